"""What the backends ask of a device: streams, events, waits, pinned memory, copies that go on by themselves.

Everything that decides, orders and waits is written against `DeviceRuntime`, which does it with torch.cuda; the tests
have one over host memory whose streams do nothing until somebody waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import torch

Stream: TypeAlias = Any  # A queue of a device: what is put there is done in order, some time. Can be a key of a dict.
Event: TypeAlias = Any  # A point in a stream
_HIGH = -1
_NOTHING: AbstractContextManager[Any] = nullcontext()


class DeviceRuntime:
    """Streams and memory of one kind of device. Any thread; nothing here waits for the device."""

    kind = "cuda"  # What torch.device.type says of its tensors

    def home(self, local_rank: int) -> torch.device:
        """The device of a process that has no tensor on one yet; the current one belongs to the thread that set it."""
        return torch.device("cuda", local_rank % torch.cuda.device_count())

    def identity(self, device: torch.device) -> str:
        """What no other device of any host is called, and this one in every process."""
        return str(torch.cuda.get_device_properties(device).uuid)

    def new_stream(self, device: torch.device) -> Stream:
        """A stream that waits for no other one unless told to; a short reduction need not wait for long kernels."""
        make: Callable[..., Stream] = torch.cuda.Stream
        return make(device, priority=_HIGH)

    def current_stream(self, device: torch.device) -> Stream:
        """Where this thread puts what it asks of `device` now."""
        return torch.cuda.current_stream(device)

    def use(self, stream: Stream) -> AbstractContextManager[Any]:
        """What this thread asks of the device meanwhile goes to `stream`, whose device is the current one."""
        return torch.cuda.stream(stream)

    def aside(self) -> AbstractContextManager[Any]:
        """What this thread does meanwhile is the host's own work in host memory, whatever stream is in use."""
        return _NOTHING

    def address(self, stream: Stream) -> int:
        """What libraries in C call the stream."""
        return int(stream.cuda_stream)

    def record(self, stream: Stream) -> Event:
        """The point behind everything that was put into the stream so far."""
        return stream.record_event()

    def wait(self, stream: Stream, event: Event) -> None:
        """What comes into the stream from now on is done after the event."""
        stream.wait_event(event)

    def has_passed(self, event: Event) -> bool:
        """Whether the device has come by this point."""
        return bool(event.query())

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Bytes of host memory that the device copies to and from by itself; torch reuses them once it has."""
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Put a copy between pinned memory and the device into the stream in use."""
        target.copy_(source, non_blocking=True)

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        """`stream` uses the memory of the tensor too: it must not go to others before what is there now is done."""
        tensor.record_stream(stream)


KINDS: dict[str, Callable[[], DeviceRuntime]] = {"cuda": DeviceRuntime}
"""The kinds of devices whose tensors have backends of their own; all others travel as copies in host memory."""

_made: dict[str, DeviceRuntime] = {}


def runtime_of(kind: str) -> DeviceRuntime | None:
    """The runtime of devices of this kind (torch.device.type); None for tensors that go the host's way."""
    if kind not in KINDS:
        return None
    runtime = _made.get(kind)
    if runtime is None:
        runtime = _made[kind] = KINDS[kind]()
    return runtime


def kind_of(device: torch.device) -> str:
    """The kind of a device whose tensors have backends of their own; empty for all others."""
    return device.type if device.type in KINDS else ""


def events_of(kind: str, tensors: Iterable[torch.Tensor]) -> list[Event]:
    """When tensors hold the values that this thread has asked for; none for those that go the host's way."""
    runtime = runtime_of(kind)
    if runtime is None:
        return []
    devices = dict.fromkeys(each.device for each in tensors if each.device.type == kind)
    return [runtime.record(runtime.current_stream(device)) for device in devices]


def forget(kind: str) -> None:
    """Make the runtime of this kind anew when it is asked for."""
    _made.pop(kind, None)
