"""Checks that what is marked @in_loop is called by the driver of the loop, or once no loop runs."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakSet

from hvlike.system.system import of_process
from hvlike.transport.loop.coroutine import IN_LOOP
from hvlike.transport.loop.loop import Loop


class _Running:
    def __init__(self) -> None:
        self.loops: WeakSet[Loop] = WeakSet()


_running = of_process(_Running)


def check_in_loop() -> None:
    """Check from here on, in this process. Before hvlike is initialised: methods that are bound already stay free."""
    import hvlike.collectives.session.context  # noqa: F401  what it imports is checked

    opened, closed = Loop.__init__, Loop.close

    @wraps(opened)
    def open_loop(loop: Loop, *args: Any, **options: Any) -> None:
        opened(loop, *args, **options)
        _running.loops.add(loop)

    @wraps(closed)
    def close_loop(loop: Loop) -> None:
        _running.loops.discard(loop)
        closed(loop)

    Loop.__init__, Loop.close = open_loop, close_loop  # type: ignore[method-assign]
    while IN_LOOP:
        _check(IN_LOOP.pop())


def _check(method: Callable[..., Any]) -> None:
    place, name = method.__qualname__.split(".")
    owner = getattr(sys.modules[method.__module__], place)

    @wraps(method)
    def checked(*args: Any, **options: Any) -> Any:
        loops = list(_running.loops)
        if loops and not any(loop.drives_here for loop in loops):
            raise AssertionError(f"{method.__qualname__}() was called outside of the loop")
        return method(*args, **options)

    setattr(owner, name, checked)
