"""Running one job on the first lane of all ranks."""

from collections.abc import Callable
from typing import Any

from hvlike.collectives.context import current
from hvlike.planes.plane import Plane
from hvlike.transport.task import Task


def run(job: Callable[[Plane], Any]) -> None:
    """Run `job(plane)` to its end. Collective."""
    lane = current().membership(None, "test").lanes.first
    ended: list[Task[None]] = []
    lane.submit(job, ended.append, wake=False)
    assert current().fabric.loop.wait(lambda: bool(ended), 60.0)
    if ended[0].error is not None:
        raise ended[0].error
