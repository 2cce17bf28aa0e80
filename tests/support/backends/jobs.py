"""Running one job on the first queue of all ranks."""

from collections.abc import Callable
from typing import Any

from hvlike.backends.base import Backend
from hvlike.collectives.session.context import current


def run(job: Callable[[Backend], Any]) -> None:
    """Run `job(backend)` to its end. Collective."""
    queue = current().find_set(None, "test").queues.first
    operation = queue.run(job)
    operation.waiter = current().fabric.loop.wait
    assert operation.wait(60.0)
