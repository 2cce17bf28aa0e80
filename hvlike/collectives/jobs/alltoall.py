"""The job of alltoall: first how many rows come from whom, then the rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from hvlike.collectives.jobs.site import Agreed, Site
from hvlike.collectives.operand import Operand
from hvlike.planes.cuda.jobs import beside, home_of
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
        home = home_of(plane)
        for request, _ in batch:
            tensor, sent = request.tensors
            splits, rows = yield from beside(plane, partial(_exchange_counts, sent))
            output = torch.empty((sum(rows), *tensor.shape[1:]), dtype=tensor.dtype, device=home or "cpu")
            source = Operand(tensor, None, home=home).flat.view(tensor.shape)[: sum(splits)]
            yield from plane.alltoall(_parts(source, splits), _parts(output, rows))
            request.outputs += [output, tuple(rows)]

    return job


def _exchange_counts(sent: torch.Tensor, host: Plane) -> Routine[tuple[list[int], list[int]]]:
    """The rows that go to each rank, and those that come."""
    received = torch.zeros_like(sent)
    yield from host.alltoall(_each(sent), _each(received))
    return sent.tolist(), received.tolist()


def _each(counts: torch.Tensor) -> list[torch.Tensor]:
    """The bytes of each element."""
    return [count.view(1).view(torch.uint8) for count in counts.unbind()]


def _parts(rows: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
    """The bytes of the rows of each rank."""
    return [part.reshape(-1).view(torch.uint8) for part in torch.split(rows, list(lengths))]
