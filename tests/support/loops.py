"""Progress loops of one process, and coroutines that run there."""

import os
import threading
import time
from collections.abc import Callable

from hvlike.system.mapped_memory import Segment
from hvlike.transport.loop.coroutine import Coroutine, Wait
from hvlike.transport.loop.loop import Loop
from hvlike.transport.loop.spin import SpinPolicy
from hvlike.transport.memory.doorbell import BELL_BYTES, Doorbell, Fence


def own_bell() -> Doorbell:
    """A doorbell in ordinary memory."""
    bell = Doorbell(Segment.private(BELL_BYTES), 0, Fence())
    bell.initialise(os.getpid())
    return bell


def own_loop(
    bell: Doorbell | None = None, *, spin: SpinPolicy | None = None, tick: Callable[[], None] = lambda: None
) -> Loop:
    """A loop without sockets."""
    return Loop(bell or own_bell(), spin=spin or SpinPolicy(crowded=False, checks=10), sockets=None, tick=tick)


def counting(steps: int, wait: Wait, taken: list[int]) -> Coroutine[int]:
    """Note at each of so many steps which thread takes it."""
    for _ in range(steps):
        taken.append(threading.get_ident())
        yield wait
    return steps


def until(condition: Callable[[], bool]) -> bool:
    """Wait until it holds, for so long that nobody waits in vain."""
    end = time.monotonic() + 30.0
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)
    return condition()
