"""The bytes of a tensor in host memory, in the order of its elements: its own memory, or a copy of it.

dense, contiguous, on the host   its own memory, without a copy
other strides, lazy conjugates   a contiguous copy
on a GPU                         pinned memory; streams copy, nobody waits for the device
on other devices                 a copy in host memory; the call waits for the device
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from hvlike.backends.cuda.runtime import DeviceRuntime, Event, runtime_of
from hvlike.errors import ProcessGroupError
from hvlike.transport.loop.coroutine import Coroutine, Wait
from hvlike.transport.memory.dtypes import Array, bytes_at
from hvlike.transport.memory.own_memory import check_memory


class TensorBytes:
    """Made by `bytes_to_send` and `bytes_to_fill`. Keeps the memory alive."""

    __slots__ = ("_before", "_ready", "_runtime", "_staged", "address", "nbytes", "tensor")

    def __init__(self, tensor: torch.Tensor, staged: torch.Tensor | None = None) -> None:
        """staged: as many bytes of host memory in place of the tensor's own."""
        memory = tensor if staged is None else staged
        self.tensor = tensor
        self.nbytes = tensor.nbytes
        self.address: int = memory.data_ptr()
        self._staged = staged
        self._runtime: DeviceRuntime | None = None
        self._before: Event = None  # When a GPU is done with what the tensor was used for
        self._ready: Event = None  # When the copy holds the values that are to be sent

    @property
    def view(self) -> Array:
        return bytes_at(self.address, self.nbytes) if self.nbytes else _NO_BYTES

    @property
    def is_ready(self) -> bool:
        """Whether the values that are to be sent are there."""
        return self._ready is None or self._runtime is None or self._runtime.has_passed(self._ready)

    @property
    def is_staged(self) -> bool:
        """Whether what has arrived is not yet in the tensor: `deliver` brings it there."""
        return self._staged is not None

    def deliver(self, nbytes: int) -> Coroutine[None]:
        """Bring the bytes that have come to the tensor; what follows them stays as it is."""
        assert self._staged is not None
        runtime, tensor, staged = self._runtime, self.tensor, self._staged
        stream: Any = None
        if runtime is not None:
            stream = runtime.common_stream(tensor.device, "deliver")
            runtime.wait(stream, self._before)
        # Tensors of inference mode may be written only there.
        writing = torch.inference_mode() if tensor.is_inference() else torch.no_grad()
        with runtime.use(stream) if runtime is not None else _NOTHING, writing:
            if nbytes < self.nbytes:
                staged[nbytes:].copy_(_flat_bytes(tensor)[nbytes:])
            values = staged.view(tensor.dtype).view(tensor.shape)
            (runtime.copy if runtime is not None else torch.Tensor.copy_)(tensor.detach(), values)
        if runtime is not None:
            runtime.keep(tensor, stream)
            event = runtime.record(stream)
            while not runtime.has_passed(event):
                yield Wait.POLL


def bytes_to_send(tensor: torch.Tensor) -> TensorBytes:
    """The bytes that a tensor has now, or will have once its GPU has come here. Raises: ProcessGroupError."""
    runtime = _check(tensor)
    if runtime is None:
        return TensorBytes(tensor) if _is_plain(tensor) else TensorBytes(tensor, _flat_bytes(tensor).cpu())
    flat = _flat_bytes(tensor)
    staged = runtime.pinned(tensor.nbytes)
    stream = runtime.current_stream(tensor.device)
    with runtime.use(stream):
        runtime.copy(staged, flat)
    made = TensorBytes(tensor, staged)
    made._runtime, made._ready = runtime, runtime.record(stream)
    return made


def bytes_to_fill(tensor: torch.Tensor) -> TensorBytes:
    """Where to receive the bytes of a tensor. Raises: ProcessGroupError."""
    runtime = _check(tensor)
    if runtime is None:
        if _is_plain(tensor):
            return TensorBytes(tensor)
        return TensorBytes(tensor, torch.empty(tensor.nbytes, dtype=torch.uint8, device="cpu"))
    made = TensorBytes(tensor, runtime.pinned(tensor.nbytes))
    made._runtime, made._before = runtime, runtime.record(runtime.current_stream(tensor.device))
    return made


_NO_BYTES = bytes_at(4096, 0)
_NOTHING: AbstractContextManager[Any] = nullcontext()


def _check(tensor: torch.Tensor) -> DeviceRuntime | None:
    if tensor.layout is not torch.strided and not tensor.is_nested:
        raise ProcessGroupError(f"expected a dense tensor, got layout {tensor.layout}; convert it with to_dense().")
    check_memory("torch.distributed.send or recv", tensor, ProcessGroupError)
    return runtime_of(tensor.device.type) if tensor.nbytes else None


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its memory holds its values, in order, where this process can read them."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.view(-1).view(torch.uint8)
