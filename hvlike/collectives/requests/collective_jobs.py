"""What the collectives do on an op queue, for negotiated requests and for groups of torch.distributed alike.

Tensors are read and written where they are, in host memory or on a GPU. One that is no dense piece of memory there goes
through a copy. What one rank sends must be as long as what the other receives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hvlike.backends.adasum import Adasum
from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.backends.base import Backend, PreparedReduction, bytes_of
from hvlike.backends.cuda.device_backend import home_of, in_host_memory
from hvlike.backends.fusion_buffer import FusionBuffer
from hvlike.backends.op_queue import Job, OpQueue
from hvlike.collectives.requests.reduction import Operand, ScaledOp, arithmetic_of, reduce_operands, working_dtype
from hvlike.transport.loop.coroutine import Coroutine
from hvlike.transport.memory.own_memory import has_memory
from hvlike.transport.world import Group

Tensors = Sequence[torch.Tensor]
Strides = tuple[int, ...] | None  # As the ranks have agreed; None: row by row

MOST_PREPARED = 256  # Kinds of reductions that are kept; with one more all are prepared anew


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor lie row by row in host memory, where they may be read and written."""
    return (
        has_memory(tensor) and tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()
    )


class PlainAllreduces:
    """Allreduces of single plain tensors, which are prepared once for each length, dtype and reduction."""

    def __init__(self, queue: OpQueue) -> None:
        self._queue = queue
        self._known: dict[tuple[int, torch.dtype, ScaledOp], PreparedReduction | None] = {}

    def job(self, tensor: torch.Tensor, reduction: ScaledOp, check: Callable[[], None] = lambda: None) -> Job | None:
        """The job that reduces a tensor where it lies; None for what is not plain, or is converted first.

        check: called before a kind of reduction is prepared; it may raise.
        """
        if not is_plain(tensor):
            return None
        kind = (tensor.numel(), tensor.dtype, reduction)
        if kind in self._known:
            prepared = self._known[kind]
        else:
            check()
            prepared = self._prepare(*kind)
        return None if prepared is None else lambda backend: prepared.run([tensor.data_ptr()], None, [tensor])

    def _prepare(self, length: int, dtype: torch.dtype, reduction: ScaledOp) -> PreparedReduction | None:
        prepared, queue = None, self._queue
        op, prescale, postscale = reduction
        if op is not ReduceOp.ADASUM and working_dtype(dtype, op) is dtype and length:
            arithmetic = arithmetic_of(dtype, op, queue.group.size, prescale, postscale)
            prepared = queue.backend.prepare([length], arithmetic)
        if len(self._known) >= MOST_PREPARED:
            self._known.clear()
        self._known[length, dtype, reduction] = prepared
        return prepared


def allreduce(
    group: Group,
    tensors: Tensors,
    strides: Sequence[Strides],
    reduction: ScaledOp,
    packer: FusionBuffer,
    backend: Backend,
) -> Coroutine[None]:
    """Reduce each tensor over the ranks, in place."""
    op, prescale, postscale = reduction
    home, size = home_of(backend), group.size
    operands = [
        Operand(each, order, working_dtype(each.dtype, op), home) for each, order in zip(tensors, strides, strict=True)
    ]

    def reduce(dtype: torch.dtype, flats: list[torch.Tensor]) -> Coroutine[None]:
        if op is ReduceOp.ADASUM:
            whole = Adasum(group.rank, size, prescale, postscale)
            return in_host_memory(backend, flats, whole.allreduce)
        return packer.allreduce(backend, flats, arithmetic_of(dtype, op, size, prescale, postscale))

    yield from reduce_operands(operands, reduce)


def reduce_scatter(
    group: Group, outputs: Tensors, inputs: Sequence[Tensors], reduction: ScaledOp, backend: Backend
) -> Coroutine[None]:
    """Reduce `inputs[i][r]` over the ranks into `outputs[i]` of position r. The inputs are only read."""
    op, prescale, postscale = reduction
    home = home_of(backend)
    targets = [Operand(each, None, working_dtype(each.dtype, op), home) for each in outputs]
    parts: dict[torch.dtype, list[torch.Tensor]] = {}
    for target, tensors in zip(targets, inputs, strict=True):
        dtype = target.flat.dtype
        row = [Operand(each, None, dtype, home).flat for each in tensors]
        copy_into(target.flat, row[group.rank])
        row[group.rank] = target.flat
        parts.setdefault(dtype, []).extend(row)
    for dtype, flats in parts.items():
        arithmetic = arithmetic_of(dtype, op, group.size, prescale, postscale)
        yield from backend.reduce_scatter(flats, list(range(group.size)) * (len(flats) // group.size), arithmetic)
    for target in targets:
        target.write_back()


def broadcast(tensors: Tensors, strides: Sequence[Strides], owners: Sequence[int], backend: Backend) -> Coroutine[None]:
    """Write each tensor of the position `owners[i]` to all others."""
    home = home_of(backend)
    operands = [Operand(each, order, home=home) for each, order in zip(tensors, strides, strict=True)]
    yield from gather_flats(backend, [operand.flat for operand in operands], owners)
    for operand in operands:
        operand.write_back()


def allgather(group: Group, outputs: Sequence[Tensors], inputs: Tensors, backend: Backend) -> Coroutine[None]:
    """Write input i of every position r to `outputs[i][r]` on all."""
    home = home_of(backend)
    operands = []
    for targets, tensor in zip(outputs, inputs, strict=True):
        row = [Operand(each, None, home=home) for each in targets]
        copy_into(row[group.rank].work, tensor)
        operands += row
    yield from gather_flats(backend, [operand.flat for operand in operands], list(range(group.size)) * len(inputs))
    for operand in operands:
        operand.write_back()


def alltoall(outputs: Tensors, inputs: Tensors, backend: Backend) -> Coroutine[None]:
    """Send `inputs[r]` to position r, and fill `outputs[r]` from there."""
    home = home_of(backend)
    sends = [bytes_of(Operand(tensor, None, home=home).flat) for tensor in inputs]
    receives = [Operand(each, None, home=home) for each in outputs]
    yield from backend.alltoall(sends, [bytes_of(operand.flat) for operand in receives])
    for operand in receives:
        operand.write_back()


def gather_flats(backend: Backend, flats: Tensors, owners: Sequence[int]) -> Coroutine[None]:
    """Write each flat tensor from the position `owners[i]` to all others."""
    full = [(bytes_of(flat), owner) for flat, owner in zip(flats, owners, strict=True) if len(flat)]
    if full:
        yield from backend.gather([flat for flat, _ in full], [owner for _, owner in full])


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Fill the own part of an output; nothing is left to do where it is the input."""
    if target.data_ptr() != source.data_ptr() or target.numel() == 0:
        target.copy_(source.detach().reshape(target.shape))
