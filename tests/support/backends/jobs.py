"""Running one job on the first queue of all ranks."""

from collections.abc import Callable
from typing import Any

from hvlike.backends.base import Backend
from hvlike.collectives.session.context import current
from hvlike.transport.loop.coroutine import Task


def run(job: Callable[[Backend], Any]) -> None:
    """Run `job(backend)` to its end. Collective."""
    queue = current().find_set(None, "test").queues.first
    ended: list[Task[None]] = []
    queue.submit(job, ended.append, wake=False)
    assert current().fabric.loop.wait(lambda: bool(ended), 60.0)
    if ended[0].error is not None:
        raise ended[0].error
