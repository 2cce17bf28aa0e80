"""What a caller asks for: a name, what must be equal on all ranks, and the tensors of this rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from hvlike.collectives.handles import Handle
from hvlike.collectives.operand import is_dense
from hvlike.collectives.places import Place
from hvlike.planes.cuda.runtime import Event
from hvlike.planes.lane import Job
from hvlike.transport.dtypes import dtype_name

Key = tuple[str, str]
"""Kind and name: what identifies an operation in flight."""


class Signature(NamedTuple):
    """What the ranks compare before any data moves. Plain values only: it travels to the coordinator."""

    kind: str
    """allreduce, broadcast, allgather, barrier, plan, ..."""
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    device: str = "cpu"
    op: int = -1
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    """Rank of the world, or -1."""
    strides: tuple[tuple[int, ...] | None, ...] = ()
    """Of dense tensors in another order than row by row; need not be equal, None for contiguous ones."""
    detail: Any = None
    """What only this kind knows about."""


@dataclass(eq=False)
class Request:
    """One operation of this rank, from the call to the end."""

    name: str
    signature: Signature
    tensors: Sequence[torch.Tensor]
    finish: Callable[[Request], Any]
    """Makes the result once the tensors or outputs hold it; called in the loop."""
    handle: Handle = field(default_factory=Handle)
    outputs: list[Any] = field(default_factory=list)
    """What the job itself has made: gathered tensors, lanes."""
    job: Callable[[Any], Job] | None = None
    """Makes the job of a request that brings its own, from what `Verdict.extra` says."""
    place: Place | str = ""
    """File and line of the call."""
    time: float = field(default_factory=time.monotonic)
    ready: Sequence[Event] = ()
    """When the tensors of a device hold their values."""
    home: torch.device | None = None
    """The device of this rank, for a request without tensors that opens a lane."""

    @property
    def key(self) -> Key:
        """What identifies the request among those in flight; the same on all ranks."""
        return (self.signature.kind, self.name)


def signature_of(kind: str, tensors: Sequence[torch.Tensor], **fields: Any) -> Signature:
    """The signature of an operation on these tensors."""
    return Signature(
        kind=kind,
        dtypes=tuple(dtype_name(tensor.dtype) for tensor in tensors),
        shapes=tuple(tuple(tensor.shape) for tensor in tensors),
        device=tensors[0].device.type if tensors else "cpu",
        strides=tuple(order_in_memory(tensor) for tensor in tensors),
        **fields,
    )


def order_in_memory(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The strides of a dense tensor that is not stored row by row; None for all others."""
    if tensor.is_contiguous() or not is_dense(tensor.shape, tensor.stride()):
        return None
    return tuple(tensor.stride())
