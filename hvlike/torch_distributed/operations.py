"""What each collective of torch.distributed does on an op queue.

Tensors are read and written where they are, in host memory or on a GPU. One that is no dense piece of memory there goes
through a copy. The sizes that the members give must fit together, as with every backend of torch.distributed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from hvlike.backends.base import Backend
from hvlike.backends.cuda.device_backend import home_of, in_host_memory
from hvlike.collectives.requests.reduction import Operand, Reduction, arithmetic_of, reduce_operands, working_dtype
from hvlike.transport.loop.coroutine import Coroutine
from hvlike.transport.world import Group

Tensors = Sequence[torch.Tensor]


def allreduce(group: Group, tensors: Tensors, reduction: Reduction, backend: Backend) -> Coroutine[None]:
    """Reduce each tensor over the members, in place."""
    op, prescale, postscale = reduction
    home = home_of(backend)
    operands = [Operand(each, None, working_dtype(each.dtype, op), home) for each in tensors]

    def reduce(dtype: torch.dtype, flats: list[torch.Tensor]) -> Coroutine[None]:
        return backend.allreduce(flats, arithmetic_of(dtype, op, group.size, prescale, postscale))

    yield from reduce_operands(operands, reduce)


def reduce_to(group: Group, tensors: Tensors, root: int, reduction: Reduction, backend: Backend) -> Coroutine[None]:
    """Reduce each tensor on the position `root`; those of the others stay as they are."""
    op, prescale, postscale = reduction
    home = home_of(backend)
    operands = [Operand(each, None, working_dtype(each.dtype, op), home) for each in tensors]
    for operand in operands:
        arithmetic = arithmetic_of(operand.flat.dtype, op, group.size, prescale, postscale)
        yield from backend.reduce_scatter([operand.flat], [root], arithmetic)
    if group.rank == root:
        for operand in operands:
            operand.write_back()


def broadcast(tensors: Tensors, root: int, backend: Backend) -> Coroutine[None]:
    """Write each tensor of the position `root` to all others."""
    operands = [Operand(each, None, home=home_of(backend)) for each in tensors]
    yield from _gather(backend, [operand.flat for operand in operands], [root] * len(operands))
    for operand in operands:
        operand.write_back()


def allgather(group: Group, outputs: Sequence[Tensors], inputs: Tensors, backend: Backend) -> Coroutine[None]:
    """Write input i of every position r to `outputs[i][r]` on all."""
    home = home_of(backend)
    operands = []
    for targets, tensor in zip(outputs, inputs, strict=True):
        row = [Operand(each, None, home=home) for each in targets]
        _copy(row[group.rank].work, tensor)
        operands += row
    owners = list(range(group.size)) * len(inputs)
    yield from _gather(backend, [operand.flat for operand in operands], owners)
    for operand in operands:
        operand.write_back()


def allgather_single(group: Group, outputs: Tensors, inputs: Tensors, backend: Backend) -> Coroutine[None]:
    """Write input i of every position, one after the other, to `outputs[i]` on all."""
    home = home_of(backend)
    operands = [Operand(each, None, home=home) for each in outputs]
    parts: list[torch.Tensor] = []
    for operand, tensor in zip(operands, inputs, strict=True):
        pieces = even(operand.flat, group.size)
        _copy(pieces[group.rank].view(tensor.shape), tensor)
        parts += pieces
    yield from _gather(backend, parts, list(range(group.size)) * len(operands))
    for operand in operands:
        operand.write_back()


def reduce_scatter(
    group: Group, outputs: Tensors, inputs: Sequence[Tensors | torch.Tensor], reduction: Reduction, backend: Backend
) -> Coroutine[None]:
    """Reduce `inputs[i][r]` over the members into `outputs[i]` of position r; a tensor there is cut evenly."""
    op, prescale, postscale = reduction

    def flat(tensor: torch.Tensor, home: torch.device | None) -> torch.Tensor:
        return Operand(tensor, None, working_dtype(tensor.dtype, op), home).flat

    home = home_of(backend)
    targets = [Operand(each, None, working_dtype(each.dtype, op), home) for each in outputs]
    parts: dict[torch.dtype, list[torch.Tensor]] = {}
    for target, tensors in zip(targets, inputs, strict=True):
        if isinstance(tensors, torch.Tensor):
            row = even(flat(tensors, home), group.size)
        else:
            row = [flat(each, home) for each in tensors]
        _copy(target.flat, row[group.rank])
        row[group.rank] = target.flat
        parts.setdefault(target.flat.dtype, []).extend(row)
    for dtype, flats in parts.items():
        arithmetic = arithmetic_of(dtype, op, group.size, prescale, postscale)
        yield from backend.reduce_scatter(flats, list(range(group.size)) * (len(flats) // group.size), arithmetic)
    for target in targets:
        target.write_back()


def alltoall(outputs: Tensors, inputs: Tensors, backend: Backend) -> Coroutine[None]:
    """Send `inputs[r]` to position r, and fill `outputs[r]` from there."""
    home = home_of(backend)
    sends = [Operand(each, None, home=home) for each in inputs]
    receives = [Operand(each, None, home=home) for each in outputs]
    yield from backend.alltoall([_bytes(each.flat) for each in sends], [_bytes(each.flat) for each in receives])
    for operand in receives:
        operand.write_back()


def gather(group: Group, outputs: Tensors, tensor: torch.Tensor, root: int, backend: Backend) -> Coroutine[None]:
    """Write the tensor of every position r to `outputs[r]` on the root; `outputs` is empty on the others."""
    nothing = tensor.detach().new_empty(0)
    sends = [nothing] * group.size
    sends[root] = tensor
    return alltoall(outputs if group.rank == root else [nothing] * group.size, sends, backend)


def scatter(group: Group, output: torch.Tensor, inputs: Tensors, root: int, backend: Backend) -> Coroutine[None]:
    """Write `inputs[r]` of the root to the output of position r; `inputs` is empty on the others."""
    nothing = output.detach().new_empty(0)
    receives = [nothing] * group.size
    receives[root] = output
    return alltoall(receives, inputs if group.rank == root else [nothing] * group.size, backend)


def barrier(backend: Backend) -> Coroutine[None]:
    yield from backend.count_active(True)


def sparse_allreduce(group: Group, tensor: torch.Tensor, backend: Backend) -> Coroutine[None]:
    """Add up sparse COO tensors, in place: all get the indices and values of all."""

    def gathered(backend: Backend, part: torch.Tensor, counts: Sequence[int]) -> Coroutine[torch.Tensor]:
        output = part.new_empty((sum(counts), *part.shape[1:]))
        pieces = list(torch.split(output, list(counts)))
        pieces[group.rank].copy_(part)
        yield from _gather(backend, [piece.reshape(-1) for piece in pieces], list(range(group.size)))
        return output

    def add(backend: Backend, parts: Sequence[torch.Tensor], results: list[torch.Tensor]) -> Coroutine[None]:
        indices, values = parts
        counts = torch.zeros(group.size, dtype=torch.int64, device="cpu")
        counts[group.rank] = len(values)
        yield from _gather(backend, list(torch.split(counts, 1)), list(range(group.size)))
        rows = counts.tolist()
        results.append((yield from gathered(backend, indices, rows)))
        results.append((yield from gathered(backend, values, rows)))

    own = tensor.detach().coalesce()
    results: list[torch.Tensor] = []
    parts = [own.indices().t().contiguous(), own.values().contiguous()]
    yield from in_host_memory(backend, parts, partial(add, results=results))
    indices, values = (each.to(tensor.device) for each in results)
    total = torch.sparse_coo_tensor(indices.t(), values, tensor.shape, device=tensor.device).coalesce()
    with torch.no_grad():  # Not into `detach()`: the new indices and values would be those of the alias.
        tensor.copy_(total)


def _gather(backend: Backend, flats: Sequence[torch.Tensor], owners: Sequence[int]) -> Coroutine[None]:
    full = [(flat, owner) for flat, owner in zip(flats, owners, strict=True) if len(flat)]
    if full:
        yield from backend.gather([_bytes(flat) for flat, _ in full], [owner for _, owner in full])


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Fill the own part of an output; nothing is left to do where it is the input."""
    if target.data_ptr() != source.data_ptr() or target.numel() == 0:
        target.copy_(source.detach().view(target.shape) if source.is_contiguous() else source.detach())


def _bytes(flat: torch.Tensor) -> torch.Tensor:
    return flat.view(torch.uint8)


def even(flat: torch.Tensor, size: int) -> list[torch.Tensor]:
    length = len(flat) // size
    return [flat[position * length : (position + 1) * length] for position in range(size)]
