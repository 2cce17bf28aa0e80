"""What the backends ask of a device: streams, events, waits, pinned memory, copies that go on by themselves.

Everything that decides, orders and waits is written against `DeviceRuntime`, which does it with torch.cuda; the tests
have one over host memory whose streams do nothing until somebody waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch

from hvlike.backends.cuda.captures import BesideCaptures, find_exchange
from hvlike.errors import UsageError

Stream: TypeAlias = Any  # A queue of a device: what is put there is done in order, some time. Can be a key of a dict.
Event: TypeAlias = Any  # A point in a stream
_HIGH = -1
_NOTHING: AbstractContextManager[Any] = nullcontext()


class DeviceRuntime:
    """Streams and memory of one kind of device. Any thread; nothing here waits for the device."""

    kind = "cuda"  # What torch.device.type says of its tensors
    has_nccl = True  # Whether NCCL, or RCCL, knows its devices

    def __init__(self) -> None:
        self._exchange = find_exchange()
        self._common: dict[tuple[torch.device, str], Stream] = {}

    def home(self, local_rank: int) -> torch.device:
        """The device of a process that has no tensor on one yet; the current one belongs to the thread that set it."""
        return torch.device("cuda", local_rank % torch.cuda.device_count())

    def identity(self, device: torch.device) -> str:
        """What NCCL tells the GPUs of a host by: the place on the bus, which is the same for the parts of a MIG GPU."""
        found: Any = torch.cuda.get_device_properties(device)
        if not hasattr(found, "pci_bus_id"):
            return str(found.uuid)
        return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}"

    def new_stream(self, device: torch.device) -> Stream:
        """A stream that waits for no other one unless told to; a short reduction need not wait for long kernels."""
        make: Callable[..., Stream] = torch.cuda.Stream
        return make(device, priority=_HIGH)

    def common_stream(self, device: torch.device, use: str) -> Stream:
        """The one stream for this use, such as "down": torch makes 32 of a priority, and then hands them out again."""
        stream = self._common.get((device, use))
        if stream is None:
            stream = self._common.setdefault((device, use), self.new_stream(device))
        return stream

    def is_capturing(self) -> bool:
        """Whether this thread captures a CUDA graph in the stream in use."""
        return bool(torch.cuda.is_current_stream_capturing())

    def beside_captures(self) -> AbstractContextManager[Any]:
        """What this thread asks meanwhile is allowed while another thread captures a CUDA graph."""
        return _NOTHING if self._exchange is None else BesideCaptures(self._exchange)

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
        # A question makes a context on the current device, if that has none: half a GiB.
        with self.beside_captures(), torch.cuda.device(event.device):
            return bool(event.query())

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Bytes of host memory that the device copies to and from by itself; torch reuses them once it has."""
        with self.beside_captures(), torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Put a copy between pinned memory and the device into the stream in use."""
        target.copy_(source, non_blocking=True)

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        """`stream` uses the memory of the tensor too: it must not go to others before what is there now is done."""
        tensor.record_stream(stream)


class AcceleratorRuntime(DeviceRuntime):
    """The same with torch.accelerator, for devices of another kind, such as XPUs: staged alone, as NCCL has none."""

    has_nccl = False

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def home(self, local_rank: int) -> torch.device:
        return torch.device(self.kind, local_rank % _accelerator.device_count())

    def identity(self, device: torch.device) -> str:
        return str(device)

    def new_stream(self, device: torch.device) -> Stream:
        return torch.Stream(device)

    def is_capturing(self) -> bool:
        return False

    def current_stream(self, device: torch.device) -> Stream:
        return _accelerator.current_stream(device)

    def use(self, stream: Stream) -> AbstractContextManager[Any]:
        used: AbstractContextManager[Any] = stream
        return used

    def address(self, stream: Stream) -> int:
        return int(stream.stream_id)

    def has_passed(self, event: Event) -> bool:
        return bool(event.query())


_accelerator: Any = getattr(torch, "accelerator", None)  # From torch 2.6 on


def _kinds() -> dict[str, Callable[[], DeviceRuntime]]:
    kinds: dict[str, Callable[[], DeviceRuntime]] = {"cuda": DeviceRuntime}
    built_for = None if _accelerator is None else _accelerator.current_accelerator()
    if built_for is not None and built_for.type != "cuda":
        kinds[built_for.type] = partial(AcceleratorRuntime, built_for.type)
    return kinds


KINDS = _kinds()
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
    if devices and runtime.is_capturing():
        raise UsageError(
            "hvlike was called while this thread captures a CUDA graph, which would not hold what the other ranks do. "
            "End the capture before you communicate, and replay the graph beside it."
        )
    return [runtime.record(runtime.current_stream(device)) for device in devices]


def forget(kind: str) -> None:
    """Make the runtime of this kind anew when it is asked for."""
    _made.pop(kind, None)
