"""What a communication hook returns: a value, or something that will have it."""

from __future__ import annotations

from typing import Any

import torch

from hvlike.collectives.context import current
from hvlike.collectives.handles import Handle


def value_of(returned: Any) -> Any:
    """The value of a Future, a Handle or a list of one, or what was returned itself. Blocks. Raises: what they do."""
    value = returned
    if isinstance(returned, Handle):
        value = returned.result()
    elif isinstance(returned, torch._C.Future):
        # The class of those that `then` makes, too.
        value = _wait_for(returned)
    if isinstance(value, list | tuple) and len(value) == 1:
        (value,) = value
    return value


def _wait_for(future: torch._C.Future[Any]) -> Any:
    """Return the value of a future; this rank takes part in communication meanwhile. Raises: its error."""
    loop = current().fabric.loop
    if not future.done():
        future.add_done_callback(lambda _: loop.post(_nothing))
        loop.wait(future.done)
    return future.value()


def _nothing() -> None:
    """Wakes the loop."""
