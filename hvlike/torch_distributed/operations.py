"""What those collectives of torch.distributed do on an op queue that hvlike's own API does not have.

The sizes that the members give must fit together, as with every backend of torch.distributed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from hvlike.backends.base import Backend
from hvlike.backends.cuda.device_backend import home_of, in_host_memory
from hvlike.collectives.requests.collective_jobs import Tensors, alltoall, copy_into, gather_flats
from hvlike.collectives.requests.reduction import Operand, ScaledOp, arithmetic_of, working_dtype
from hvlike.transport.loop.coroutine import Coroutine
from hvlike.transport.world import Group


def reduce_to(group: Group, tensors: Tensors, root: int, reduction: ScaledOp, backend: Backend) -> Coroutine[None]:
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


def allgather_single(group: Group, outputs: Tensors, inputs: Tensors, backend: Backend) -> Coroutine[None]:
    """Write input i of every position, one after the other, to `outputs[i]` on all."""
    home = home_of(backend)
    operands = [Operand(each, None, home=home) for each in outputs]
    parts: list[torch.Tensor] = []
    for operand, tensor in zip(operands, inputs, strict=True):
        pieces = even(operand.flat, group.size)
        copy_into(pieces[group.rank].view(tensor.shape), tensor)
        parts += pieces
    yield from gather_flats(backend, parts, list(range(group.size)) * len(operands))
    for operand in operands:
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
        yield from gather_flats(backend, [piece.reshape(-1) for piece in pieces], list(range(group.size)))
        return output

    def add(backend: Backend, parts: Sequence[torch.Tensor], results: list[torch.Tensor]) -> Coroutine[None]:
        indices, values = parts
        counts = torch.zeros(group.size, dtype=torch.int64, device="cpu")
        counts[group.rank] = len(values)
        yield from gather_flats(backend, list(torch.split(counts, 1)), list(range(group.size)))
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


def even(flat: torch.Tensor, size: int) -> list[torch.Tensor]:
    length = len(flat) // size
    return [flat[position * length : (position + 1) * length] for position in range(size)]
