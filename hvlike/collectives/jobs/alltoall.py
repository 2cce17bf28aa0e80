"""The job of alltoall: first how many rows come from whom, then the rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvlike.collectives.jobs.site import Agreed, Site
from hvlike.collectives.operand import Operand
from hvlike.planes.lane import Job
from hvlike.planes.plane import Plane
from hvlike.transport.routine import Routine


def alltoall_job(site: Site, batch: Sequence[Agreed]) -> Job:
    """Exchange rows; the tensors of a request are the rows and how many of them go to each rank (int64).

    The outputs are the rows that came, and how many came from each rank.
    The numbers are exchanged here and not told by the coordinator, which would have to send all of them,
    size * size, to everybody.
    """

    def job(plane: Plane) -> Routine[None]:
        for request, _ in batch:
            tensor, sent = request.tensors
            received = torch.zeros_like(sent)
            yield from plane.alltoall(_each(sent), _each(received))
            splits, rows = sent.tolist(), received.tolist()
            output = torch.empty((sum(rows), *tensor.shape[1:]), dtype=tensor.dtype, device="cpu")
            source = Operand(tensor, None).flat.view(tensor.shape)[: sum(splits)]
            yield from plane.alltoall(_parts(source, splits), _parts(output, rows))
            request.outputs += [output, tuple(rows)]

    return job


def _each(counts: torch.Tensor) -> list[torch.Tensor]:
    """The bytes of each element."""
    return [count.view(1).view(torch.uint8) for count in counts.unbind()]


def _parts(rows: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
    """The bytes of the rows of each rank."""
    return [part.reshape(-1).view(torch.uint8) for part in torch.split(rows, list(lengths))]
