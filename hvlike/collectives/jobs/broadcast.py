"""The job of broadcast: every tensor of a batch written from its root."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvlike.collectives.jobs.site import Agreed, Site
from hvlike.collectives.operand import Operand
from hvlike.planes.cuda.jobs import home_of
from hvlike.planes.lane import Job
from hvlike.planes.plane import Plane
from hvlike.transport.routine import Routine


def broadcast_job(site: Site, batch: Sequence[Agreed]) -> Job:
    """Write the tensors of the roots, which may differ, to all members."""

    def job(plane: Plane) -> Routine[None]:
        operands = []
        owners = []
        home = home_of(plane)
        for request, verdict in batch:
            owner = site.group.ranks.index(request.signature.root)
            for tensor, strides, alike in zip(request.tensors, request.signature.strides, verdict.extra, strict=True):
                operands.append(Operand(tensor, strides if alike else None, home=home))
                owners.append(owner)
        yield from plane.gather([operand.flat.view(torch.uint8) for operand in operands], owners)
        for operand in operands:
            operand.write_back()

    return job
