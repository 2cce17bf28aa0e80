"""What is asked of torch.cuda and beside captures, and which backend serves CUDA tensors on all ranks."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hvlike.backends.cuda import runtime
from hvlike.backends.cuda.captures import BesideCaptures, find_exchange
from hvlike.backends.cuda.opening import BackendChoice, DeviceFacts, choose_backend, why_not_nccl
from hvlike.backends.cuda.runtime import DeviceRuntime
from hvlike.errors import LaunchError, UsageError


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


GLOBAL, RELAXED = 0, 2


class Driver:
    """A library with the mode of one thread."""

    def __init__(self) -> None:
        self.mode = GLOBAL

    def exchange(self, mode: Any) -> int:
        held = ctypes.cast(mode, ctypes.POINTER(ctypes.c_int)).contents
        held.value, self.mode = self.mode, held.value
        return 0


def test_the_mode_is_relaxed_inside_and_the_old_one_after() -> None:
    driver = Driver()
    with BesideCaptures(driver.exchange):
        assert driver.mode == RELAXED
        with BesideCaptures(driver.exchange):
            assert driver.mode == RELAXED
        assert driver.mode == RELAXED
    assert driver.mode == GLOBAL


def test_an_error_leaves_the_old_mode() -> None:
    driver = Driver()
    with pytest.raises(ValueError, match="asked"), BesideCaptures(driver.exchange):
        raise ValueError("asked")
    assert driver.mode == GLOBAL


@pytest.mark.skipif(find_exchange() is not None, reason="CUDA is loaded here")
def test_without_cuda_there_is_nothing_to_do() -> None:
    with DeviceRuntime().beside_captures():
        pass


A, B = DeviceFacts("one", "gpu-a", 22703, ""), DeviceFacts("one", "gpu-b", 22703, "")
FAR = DeviceFacts("two", "gpu-a", 22703, "")
BARE = DeviceFacts("one", "gpu-c", 0, "CuPy is not installed: pip install hvlike[cuda12]")
OLD = DeviceFacts("one", "gpu-d", 21801, "")


@pytest.mark.parametrize(
    ("facts", "wanted", "expected"),
    [
        ([A, B], "auto", "nccl"),
        ([A, FAR], "auto", "nccl"),
        ([A, B], "staged", "staged"),
        ([A], "auto", "solo"),
        ([BARE], "staged", "solo"),
        ([A], "nccl", "nccl"),
        ([A, B], "nccl", "nccl"),
    ],
)
def test_the_backend(facts: list[DeviceFacts], wanted: str, expected: str) -> None:
    assert choose_backend(facts, range(len(facts)), wanted).backend == expected


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ([A, B, A], ["ranks 4 and 6 on one share the GPU gpu-a", "3 ranks use 2", "torch.cuda.set_device"]),
        ([A, BARE], ["rank 5 has no NCCL", "pip install hvlike[cuda12]"]),
        ([A, OLD], ["different versions", "21801 on rank 5", "22703 on rank 4"]),
    ],
)
def test_the_reason_names_ranks_and_what_to_do(facts: list[DeviceFacts], words: list[str]) -> None:
    ranks = [4, 5, 6][: len(facts)]
    reason = why_not_nccl(facts, ranks)
    assert all(word in reason for word in words), reason
    assert choose_backend(facts, ranks, "auto") == BackendChoice("staged", reason)
    with pytest.raises(LaunchError) as caught:
        choose_backend(facts, ranks, "nccl")
    assert reason in str(caught.value)


def test_cupy_that_cannot_serve_is_unexpected() -> None:
    broken = DeviceFacts("one", "gpu-e", 0, "CuPy 13.0 is installed, but it finds no libnccl.so", "13.0")
    assert choose_backend([A, broken], range(2), "auto").is_unexpected
    assert not choose_backend([A, BARE], range(2), "auto").is_unexpected
    assert not choose_backend([broken, broken], range(2), "staged").is_unexpected
