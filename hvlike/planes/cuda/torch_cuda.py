"""DeviceRuntime over torch.cuda: the only lines of the CUDA planes that talk to the driver."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing

from hvlike.planes.cuda.runtime import Event, Stream

_HIGH = -1
_NOTHING: AbstractContextManager[Any] = nullcontext()


class CudaRuntime:
    """See DeviceRuntime."""

    kind = "cuda"

    def home(self, local_rank: int) -> torch.device:
        """See DeviceRuntime; the current device is one of the thread that has set it, which this need not be."""
        return torch.device("cuda", local_rank % torch.cuda.device_count())

    def identity(self, device: torch.device) -> str:
        """See DeviceRuntime."""
        return str(torch.cuda.get_device_properties(device).uuid)

    def new_stream(self, device: torch.device) -> Stream:
        """See DeviceRuntime; of high priority, so that a short reduction need not wait for long kernels."""
        make: Callable[..., Stream] = torch.cuda.Stream
        return make(device, priority=_HIGH)

    def current_stream(self, device: torch.device) -> Stream:
        """See DeviceRuntime."""
        return torch.cuda.current_stream(device)

    def use(self, stream: Stream) -> AbstractContextManager[Any]:
        """See DeviceRuntime; also makes the stream's device the current one."""
        return torch.cuda.stream(stream)

    def aside(self) -> AbstractContextManager[Any]:
        """See DeviceRuntime; CUDA knows host memory by itself."""
        return _NOTHING

    def address(self, stream: Stream) -> int:
        """See DeviceRuntime."""
        return int(stream.cuda_stream)

    def record(self, stream: Stream) -> Event:
        """See DeviceRuntime."""
        return stream.record_event()

    def wait(self, stream: Stream, event: Event) -> None:
        """See DeviceRuntime."""
        stream.wait_event(event)

    def has_passed(self, event: Event) -> bool:
        """See DeviceRuntime."""
        return bool(event.query())

    def pinned(self, nbytes: int) -> torch.Tensor:
        """See DeviceRuntime."""
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def shareable(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """See DeviceRuntime."""
        with torch.inference_mode(False):
            return torch.zeros(nbytes, dtype=torch.uint8, device=device)

    def share(self, tensor: torch.Tensor) -> bytes:
        """See DeviceRuntime; as torch sends tensors between processes."""
        return bytes(ForkingPickler.dumps(tensor))

    def attach(self, shared: bytes) -> torch.Tensor:
        """See DeviceRuntime."""
        tensor: torch.Tensor = pickle.loads(shared)
        return tensor

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See DeviceRuntime."""
        target.copy_(source, non_blocking=True)

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        """See DeviceRuntime."""
        tensor.record_stream(stream)
