"""The job of reducescatter: every rank gets the reduction of its rows alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvlike.collectives.jobs.site import Agreed, Site
from hvlike.collectives.operand import Operand, working_dtype
from hvlike.collectives.reductions import arithmetic_of
from hvlike.planes.cuda.jobs import home_of
from hvlike.planes.lane import Job
from hvlike.planes.ops import ReduceOp
from hvlike.planes.plane import Plane
from hvlike.transport.routine import Routine


def reducescatter_job(site: Site, batch: Sequence[Agreed]) -> Job:
    """Reduce; all requests of the batch have the same op and factors. The inputs are only read."""
    signature = batch[0][0].signature
    op = ReduceOp(signature.op)
    size, rank = site.group.size, site.group.rank

    def job(plane: Plane) -> Routine[None]:
        parts: dict[torch.dtype, list[torch.Tensor]] = {}
        results = []
        home = home_of(plane)
        for request, _ in batch:
            for index, tensor in enumerate(request.tensors):
                rows = request.signature.detail[index] if request.signature.detail else even_rows(len(tensor), size)
                whole = Operand(tensor, None, working_dtype(tensor.dtype, op), home).flat.view(tensor.shape)
                pieces = list(torch.split(whole, list(rows)))
                pieces[rank] = pieces[rank].clone()
                parts.setdefault(whole.dtype, []).extend(piece.reshape(-1) for piece in pieces)
                results.append((request, tensor.dtype, pieces[rank]))
        for dtype, flats in parts.items():
            arithmetic = arithmetic_of(dtype, op, size, signature.prescale, signature.postscale)
            yield from plane.reduce_scatter(flats, list(range(size)) * (len(flats) // size), arithmetic)
        for request, dtype, mine in results:
            request.outputs.append(mine.to(dtype))

    return job


def even_rows(total: int, size: int) -> tuple[int, ...]:
    """The rows of each rank; the first ones get one more where they are uneven. 5 rows, 3 ranks: 2, 2, 1."""
    return tuple(total // size + (rank < total % size) for rank in range(size))
