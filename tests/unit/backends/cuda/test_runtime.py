"""What the runtime asks of torch.cuda: few streams, questions on the right device, GPUs told apart as NCCL does."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hvlike.backends.cuda import runtime
from hvlike.backends.cuda.runtime import DeviceRuntime
from hvlike.errors import UsageError


def test_streams_for_copies_are_made_once_for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch hands out 32 streams of a priority in turn: the 33rd is one that somebody else uses."""
    made: list[torch.device] = []
    monkeypatch.setattr(DeviceRuntime, "new_stream", lambda self, device: made.append(device) or object())
    device, other = torch.device("cuda", 0), torch.device("cuda", 1)
    here = DeviceRuntime()
    streams = {here.common_stream(device, use) for use in ("down", "up", "deliver") for _ in range(100)}
    assert len(streams) == len(made) == 3
    assert here.common_stream(other, "down") not in streams


def test_a_question_is_asked_on_the_device_of_the_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the current device of the loop's thread, GPU 0, it would make a context there."""
    current: list[Any] = ["GPU 0"]

    @contextmanager
    def device(wanted: Any) -> Iterator[None]:
        current.append(wanted)
        yield
        current.pop()

    asked: list[Any] = []
    event = SimpleNamespace(device="GPU 5", query=lambda: asked.append(current[-1]) or True)
    monkeypatch.setattr(torch.cuda, "device", device)
    assert DeviceRuntime().has_passed(event)
    assert asked == ["GPU 5"]


def test_parts_of_one_gpu_are_one_to_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [SimpleNamespace(uuid=f"MIG-{part}", pci_domain_id=0, pci_bus_id=7, pci_device_id=1) for part in range(2)]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: parts[device.index])
    identities = {DeviceRuntime().identity(torch.device("cuda", part)) for part in range(2)}
    assert identities == {"0000:07:01"}
    old = SimpleNamespace(uuid="GPU-1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: old)
    assert DeviceRuntime().identity(torch.device("cuda", 0)) == "GPU-1"


def test_a_call_inside_of_a_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    capturing = SimpleNamespace(is_capturing=lambda: True)
    monkeypatch.setitem(runtime.KINDS, "cpu", lambda: capturing)
    try:
        with pytest.raises(UsageError, match="while this thread captures a CUDA graph"):
            runtime.events_of("cpu", [torch.ones(1)])
        assert runtime.events_of("cpu", []) == []
    finally:
        runtime.forget("cpu")
