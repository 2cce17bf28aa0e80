"""What a backward leaves in the timeline of the workers that it goes through."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from support.autograd.backward_functions import square


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
