"""The job of a plan: the lane it will run on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from hvlike.collectives.jobs.site import Agreed, Site
from hvlike.collectives.request import Request
from hvlike.errors import LaunchError
from hvlike.planes.cuda.runtime import runtime_of
from hvlike.planes.lane import Job
from hvlike.planes.plane import Plane
from hvlike.transport.routine import Routine


def plan_job(site: Site, batch: Sequence[Agreed]) -> Job:
    """Take or open a lane; a job like any other, so that lanes are opened in the same order everywhere."""
    request, verdict = batch[0]

    def job(plane: Plane) -> Routine[None]:
        lane = yield from site.lanes.take(verdict.extra.spare_lane)
        runtime = runtime_of(verdict.extra.device)
        if runtime is not None and lane.device is None:
            try:
                lane.device = yield from site.devices.open(lane.plane, runtime, request.home)
            except LaunchError as error:
                # Of every rank alike: the first lane, where this runs, is as good as before.
                request.finish = partial(_refuse, error)
        request.outputs += [lane, verdict.extra]

    return job


def _refuse(error: LaunchError, request: Request) -> None:
    raise error
