"""Calls in torch's profilers and in the timeline: under which names, on which workers, and nothing else changed."""

import json
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.rpc.doors import await_promise, keep_promise
from support.rpc.forms import FORMS, Form, asynchronous, synchronous
from torch.autograd import profiler_legacy

import hvlike.rpc
from hvlike.rpc.agent.agent import current_agent
from hvlike.rpc.functions import async_execution

legacy_profile: Any = profiler_legacy.profile


def multiply(x: torch.Tensor) -> torch.Tensor:
    return torch.mul(x, 3)


def multiply_slowly(x: torch.Tensor) -> torch.Tensor:
    """Takes longer than its caller needs to return a future."""
    time.sleep(0.05)
    return torch.mul(x, 3)


@async_execution
def multiply_later(to: int, x: torch.Tensor) -> Any:
    torch.neg(x)
    return hvlike.rpc.rpc_async(to, multiply_slowly, (x,)).then(lambda future: future.wait())


def fail() -> None:
    raise ValueError("as without a profiler")


def fail_otherwise() -> None:
    raise KeyError("as without a profiler")


EACH_FORM = pytest.mark.parametrize(("name", "form"), FORMS.items(), ids=FORMS)


@pytest.fixture
def way(rpc: ModuleType, hvd: ModuleType, peer: int) -> str:
    return f"({rpc.get_worker_info().name} -> {rpc.rpc_sync(peer, rpc.get_worker_info).name})"


def kineto(**options: Any) -> Any:
    """What torch.profiler.profile starts; that itself imports torch's compiler first, for seconds."""
    return torch.autograd.profiler.profile(use_kineto=True, **options)


@pytest.mark.parametrize("profiler", [legacy_profile, kineto])
@EACH_FORM
def test_profilers_have_the_call(
    hvd: ModuleType, rpc: ModuleType, peer: int, way: str, name: str, form: Form, profiler: Callable[[], Any]
) -> None:
    """Operators of torch, builtins, and functions that answer later, under the names that people know."""
    with profiler() as profile:
        assert form(peer, multiply, (torch.ones(2),)).tolist() == [3, 3]
        assert form(peer, multiply_later, (hvd.rank(), torch.ones(2))).tolist() == [3, 3]
        form(peer, torch.add, (torch.ones(2), 1))
        form(peer, min, (1, 2))
    nodes = {event.name: event.node_id for event in profile.function_events}
    for function in ("multiply", "multiply_later", "aten::add", "min"):
        assert f"rpc_{name}#{function}{way}" in nodes
        assert profiler is kineto or nodes[f"rpc_{name}#{function}{way}"] == hvd.rank()


def test_a_profile_has_only_its_own_calls(rpc: ModuleType, peer: int, way: str) -> None:
    with legacy_profile():
        rpc.rpc_sync(peer, multiply, (torch.ones(2),))
        left = rpc.rpc_async(peer, multiply, (torch.ones(2),))
    left.wait()
    with legacy_profile() as profile:
        torch.ones(2)
    assert not [event for event in profile.function_events if "rpc_" in event.name]


@pytest.mark.parametrize("profiler", [legacy_profile, kineto])
def test_errors_are_the_same(rpc: ModuleType, peer: int, profiler: Callable[[], Any]) -> None:
    with profiler():
        for form in FORMS.values():
            with pytest.raises(ValueError, match="as without a profiler"):
                form(peer, fail)
        with pytest.raises(RuntimeError, match="KeyError: On WorkerInfo"):
            synchronous(peer, fail_otherwise)
        with pytest.raises(RuntimeError, match="KeyError: On WorkerInfo"):
            asynchronous(peer, fail_otherwise)
        with pytest.raises((AttributeError, TypeError, pickle.PicklingError), match=r"lambda|local"):
            asynchronous(peer, min, (lambda: None,))
        for wrong in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
            with pytest.raises(TypeError, match=r"function should be callable\."):
                wrong(peer, 5)
            with pytest.raises(RuntimeError, match="could not find destination"):
                wrong("nobody", min, (1, 2))


@pytest.mark.skipif(
    "profile_all_threads" not in (torch._C._profiler._ExperimentalConfig.__init__.__doc__ or ""),
    reason="this torch records one thread only",
)
def test_torch_profiler_of_all_threads_has_the_run_on_the_worker_that_serves(
    hvd: ModuleType, rpc: ModuleType, peer: int
) -> None:
    caller = rpc.rpc_sync((hvd.rank() - 1) % hvd.size(), rpc.get_worker_info)
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with kineto(experimental_config=config) as profile:
        hvd.barrier()
        rpc.rpc_sync(peer, multiply, (torch.ones(2),))
        hvd.barrier()
    names = [event.name for event in profile.function_events]
    assert f"rpc_run#multiply({caller.name} -> {rpc.get_worker_info().name})" in names


def test_a_call_may_outlast_the_profile(hvd: ModuleType, rpc: ModuleType, peer: int) -> None:
    for number, profiler in enumerate((legacy_profile, kineto)):
        name = f"outlasting {hvd.rank()} {number}"
        with profiler():
            future = rpc.rpc_async(peer, await_promise, (name,))
        rpc.rpc_sync(peer, keep_promise, (name, 5))
        assert future.wait() == 5


def test_calls_are_recorded_only_while_a_profiler_runs(rpc: ModuleType) -> None:
    agent = current_agent()
    assert not agent.is_recorded
    for profiler in (legacy_profile, kineto):
        with profiler():
            assert agent.is_recorded
    assert not agent.is_recorded


@pytest.fixture
def timeline(hvd: ModuleType, tmp_path: Path) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Records; gives the events so far and ends the recording."""
    path = tmp_path / "timeline.json"
    hvd.start_timeline(path)
    hvd.barrier()

    def events() -> list[dict[str, Any]]:
        hvd.barrier()
        hvd.stop_timeline()
        (written,) = tmp_path.glob("*.json")
        parsed = json.loads(written.read_text())
        return list(parsed["traceEvents"] if isinstance(parsed, dict) else parsed)

    yield events
    hvd.stop_timeline()


def phases(events: list[dict[str, Any]], title: str) -> list[tuple[str, dict[str, Any], float, dict[str, Any]]]:
    """Name, arguments, microseconds and closing arguments of what stood in the rows `title`."""
    rows = [
        each["tid"] for each in events if each.get("name") == "thread_name" and each["args"]["name"].startswith(title)
    ]
    found = []
    for row in rows:
        begun: list[dict[str, Any]] = []
        for event in events:
            if event["tid"] == row and event["ph"] == "B":
                begun.append(event)
            elif event["tid"] == row and event["ph"] == "E":
                start = begun.pop()
                found.append((start["name"], start["args"], event["ts"] - start["ts"], event.get("args", {})))
        assert not begun
    return found


def test_the_timeline_shows_calls_on_both_workers(
    rpc: ModuleType, peer: int, timeline: Callable[[], list[dict[str, Any]]]
) -> None:
    me, callee = rpc.get_worker_info(), rpc.rpc_sync(peer, rpc.get_worker_info)
    for form in FORMS.values():
        form(peer, multiply, (torch.ones(1000),))
    with pytest.raises(ValueError):
        synchronous(peer, fail)
    result = asynchronous(peer, multiply_later, (me.id, torch.ones(2)))
    assert torch.equal(result, torch.full((2,), 3.0))
    events = timeline()
    calls = [(name, said["callee"]) for name, said, _, _ in phases(events, "rpc calls")]
    for name in ("rpc_sync", "rpc_async", "rpc_remote"):
        assert (f"{name} multiply", callee.name) in calls
    served = phases(events, "rpc serves")
    for name in ("QUEUE", "RUN"):
        mine = [each for each in served if each[0] == name and each[1]["function"] == "multiply"]
        assert len(mine) >= 3
        for _, said, microseconds, _ in mine:
            assert said["bytes"] > 0
            assert said["caller"].startswith("worker")
            assert microseconds >= 0
    assert max(said["bytes"] for _, said, _, _ in served) >= 4000
    assert [each for each in served if each[0] == "LATER" and each[1]["function"] == "multiply_later"]
    assert [each for each in served if each[0] == "RUN" and each[3].get("error") == "ValueError"]
    assert [each for each in served if each[0] == "RUN" and each[3].get("bytes", 0) >= 4000]
