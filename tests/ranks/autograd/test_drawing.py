"""What can be seen of a context: draw shows all workers that it has reached, the timeline what a backward did there."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.autograd.sights import square
from torch import Tensor

import hvlike
from hvlike.autograd.contexts import contexts
from hvlike.errors import UsageError


@dataclass
class Picture:
    """What a text in DOT says."""

    clusters: dict[int, str]
    """Rank -> label."""
    nodes: dict[str, tuple[str, str]]
    """Name -> shape, label."""
    edges: list[tuple[str, str]]
    crossing: list[tuple[str, str]]


def read(dot: str) -> Picture:
    """Take the text apart; every line must be one that is known, and every edge must lead from node to node."""
    assert dot.startswith("digraph autograd {\n")
    assert dot.count("{") == dot.count("}")
    text = r'"((?:[^"\\]|\\.)*)"'
    clusters = {int(rank): label for rank, label in re.findall(rf"subgraph cluster_(\d+) {{\n    label={text};\n", dot)}
    nodes = {
        name: (shape, label) for name, shape, label in re.findall(rf"(w\d+n\d+) \[shape=(\w+), label={text}.*\];", dot)
    }
    edges = re.findall(r"    (w\d+n\d+) -> (w\d+n\d+);\n", dot)
    crossing = re.findall(r"  (w\d+n\d+) -> (w\d+n\d+) \[style=dashed\];\n", dot)
    assert dot.count(" -> ") == len(edges) + len(crossing)
    assert {end for edge in edges + crossing for end in edge} <= set(nodes)
    return Picture(clusters, nodes, edges, crossing)


def first(rpc: ModuleType) -> bool:
    """Rank 0 tests, the others serve until the fixture's shutdown."""
    return bool(rpc.get_worker_info().id == 0)


def add_over(ranks: list[int], left: Tensor, right: Tensor) -> Tensor:
    """left + right, computed by the last of these ranks, each of which asks the next."""
    if not ranks:
        return left + right
    from hvlike import rpc

    total: Tensor = rpc.rpc_sync(ranks[0], add_over, (ranks[1:], left, right))
    return total


def test_a_sum_on_another_worker(rpc: ModuleType, autograd: ModuleType) -> None:
    if first(rpc):
        last = hvlike.size() - 1
        a, b = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
        with autograd.context() as context_id:
            loss = (rpc.rpc_sync(last, torch.add, (a, b)) * a).sum()
            found = read(autograd.draw(context_id, [loss]))
        assert sorted(found.clusters) == sorted({0, last})
        assert found.clusters[last].startswith(f"worker{last} (rank {last})")
        labels = [label for _, label in found.nodes.values()]
        assert labels.count(r"leaf\n[3] float32") == 2
        assert r"root\n[] float32" in labels
        assert sum("AddBackward0" in label for label in labels) == 1
        # The arguments and the result.
        shapes = [(found.nodes[start][0], found.nodes[end][0]) for start, end in found.crossing]
        assert shapes == [("house", "cds")] * 2
        names = [tuple(end.partition("n")[0] for end in edge) for edge in found.crossing]
        assert sorted(names) == sorted([("w0", f"w{last}"), (f"w{last}", "w0")])
        assert all("aten::add" in label for shape, label in found.nodes.values() if shape == "cds")


@pytest.mark.mpi(min_size=3)
def test_workers_that_were_reached_by_others(rpc: ModuleType, autograd: ModuleType) -> None:
    if first(rpc):
        a, b = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
        with autograd.context() as context_id:
            add_over([1, 2], a, b)
            assert contexts.find(context_id).reached == {1}
            found = read(autograd.draw(context_id))
            assert sorted(found.clusters) == [0, 1, 2]
            # Two arguments there, two results back.
            assert len(found.crossing) == 4
            # Drawing has not become a part of what is drawn.
            assert contexts.find(context_id).reached == {1}
            assert read(autograd.draw(context_id)) == found


def test_a_context_without_tensors(rpc: ModuleType, autograd: ModuleType) -> None:
    with autograd.context() as context_id:
        rank = rpc.get_worker_info().id
        assert read(autograd.draw(context_id)) == Picture({rank: f"worker{rank} (rank {rank})"}, {}, [], [])


def test_messages_of_which_nothing_was_made(rpc: ModuleType, autograd: ModuleType) -> None:
    if first(rpc):
        last = hvlike.size() - 1
        with autograd.context() as context_id:
            rpc.rpc_sync(last, Tensor.numel, (torch.ones(3, requires_grad=True),))
            found = read(autograd.draw(context_id))
        assert len(found.crossing) == 1
        assert [shape for shape, _ in found.nodes.values()].count("house") == 1


def test_what_is_refused(rpc: ModuleType, autograd: ModuleType) -> None:
    with autograd.context() as context_id:
        with pytest.raises(UsageError, match=r"roots must be tensors that have a grad_fn, got \[2\] float32"):
            autograd.draw(context_id, [torch.ones(2, requires_grad=True)])
        with pytest.raises(UsageError, match="got str"):
            autograd.draw(context_id, ["loss"])
        with pytest.raises(TypeError, match="incompatible function arguments"):
            autograd.draw("1")
    with pytest.raises(RuntimeError, match=f"Could not find autograd context with id: {context_id}"):
        autograd.draw(context_id)


def test_after_a_backward(rpc: ModuleType, autograd: ModuleType) -> None:
    """The segments stand above each worker's part, and beside the messages whose gradients they used or made."""
    if first(rpc):
        last = hvlike.size() - 1
        a, b = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
        with autograd.context() as context_id:
            loss = (rpc.rpc_sync(last, torch.add, (a, b)) * a).sum()
            assert "segment" not in autograd.draw(context_id, [loss])
            autograd.backward(context_id, [loss])
            found = read(autograd.draw(context_id, [loss]))
        for label in found.clusters.values():
            assert re.search(r"segment 1: (plain|selective|final), nodes: \d+", label)
        ends = [label for shape, label in found.nodes.values() if shape in ("house", "cds")]
        assert all("segment" in label for label in ends)
        assert [label.endswith("has a gradient") for _, label in found.nodes.values()].count(True) == 2


def rows(events: list[dict[str, Any]], title: str) -> list[dict[str, Any]]:
    """The events in the rows whose titles begin so."""
    numbers = {
        each["tid"] for each in events if each.get("name") == "thread_name" and each["args"]["name"].startswith(title)
    }
    return [each for each in events if each["tid"] in numbers and each["ph"] in "BEi"]


def test_sends_segments_and_gradients_are_shown(
    hvd: ModuleType, rpc: ModuleType, autograd: ModuleType, peer: int, tmp_path: Path
) -> None:
    hvd.start_timeline(tmp_path / "timeline.json")
    hvd.barrier()
    leaf = torch.ones(2, requires_grad=True)
    with autograd.context() as context:
        autograd.backward(context, [rpc.rpc_sync(peer, square, (leaf,)).sum()])
    hvd.barrier()
    hvd.stop_timeline()
    (written,) = tmp_path.glob("*.json")
    parsed = json.loads(written.read_text())
    events = parsed["traceEvents"] if isinstance(parsed, dict) else parsed

    messages = rows(events, "autograd messages")
    mine = [each for each in messages if each["args"]["context"] == context]
    (sent,) = [each for each in mine if each["name"] == "SEND square" and each["args"]["to"] == peer][:1]
    assert sent["args"]["tensors"] == 1
    gradients = [each["args"] for each in mine if each["name"] == "GRADIENTS"]
    if peer != hvd.rank():
        assert [each.get("to", each.get("from")) for each in gradients] == [peer, peer]
        assert gradients[1]["messages"] == [sent["args"]["message"]]

    stays = rows(events, "autograd backwards")
    backwards = [each for each in stays if each["name" if "name" in each else "ph"] == "BACKWARD"]
    assert [each["args"]["mode"] for each in backwards if each["args"]["context"] == context] == ["safe"]
    segments = [each["args"] for each in stays if each.get("name") == "SEGMENT"]
    assert sum(each["leaves"] for each in segments) == 1
    assert sum(len(each["gradients for"]) for each in segments) == 2
    opened, ended = (sum(each["ph"] == phase for each in stays) for phase in "BE")
    # What the others began here may end a moment after they have what they waited for.
    assert 0 <= opened - ended < hvd.size()
