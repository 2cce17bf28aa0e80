"""The job of allgather: room for the rows of all ranks, the own rows put there, the others' written by their owners."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hvlike.collectives.jobs.site import Agreed, Site
from hvlike.planes.cuda.jobs import home_of
from hvlike.planes.lane import Job
from hvlike.planes.plane import Plane
from hvlike.transport.routine import Routine


def allgather_job(site: Site, batch: Sequence[Agreed]) -> Job:
    """Gather; the outputs of a request are pairs of a tensor and the rows that each rank has in it."""

    def job(plane: Plane) -> Routine[None]:
        pieces: list[torch.Tensor] = []
        home = home_of(plane) or "cpu"
        for request, verdict in batch:
            for index, tensor in enumerate(request.tensors):
                rows = tuple(lengths[index] for lengths in verdict.extra)
                output = torch.empty((sum(rows), *tensor.shape[1:]), dtype=tensor.dtype, device=home)
                parts = torch.split(output, list(rows))
                own = parts[site.group.rank]
                own.copy_(tensor.detach().reshape(own.shape))
                pieces += [part.reshape(-1).view(torch.uint8) for part in parts]
                request.outputs.append((output, rows))
        yield from plane.gather(pieces, list(range(site.group.size)) * (len(pieces) // site.group.size))

    return job


def gathered_bytes(agreed: Agreed) -> int:
    """Bytes of the results of an allgather, the same number on every rank."""
    request, verdict = agreed
    return sum(
        sum(lengths[index] for lengths in verdict.extra) * math.prod(tensor.shape[1:]) * tensor.element_size()
        for index, tensor in enumerate(request.tensors)
    )
