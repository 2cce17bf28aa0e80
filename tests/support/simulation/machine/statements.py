"""Between two statements of hvlike another thread of the same rank may go on: they share its objects, often without a
lock. The system takes the core from a thread wherever it likes.

Other ranks see nothing of what a rank does between two points; its own threads do. Python calls a function for every
line of a thread, which takes long: only from a point that the seed decides to the statement where the core is taken.
"""

from __future__ import annotations

import sys
from bisect import insort
from types import FrameType
from typing import Any

from support.simulation.machine.scheduler import Scheduler, without_a_core
from support.simulation.machine.simulated_thread import HVLIKE

MOST_STATEMENTS = 40.0  # From the point to where the core is taken: so many on average, or fewer
# Who is called from there has a real lock, or the turn is being handed on: nobody may wait there.
NOWHERE = ("/logging/", "/functools.py", "/warnings.py", "<frozen importlib", "/simulation/machine/")
BASES = ("live", "run", "wait_for")  # But these functions of the simulation call hvlike like anybody else


class Statements:
    """Takes the core from threads of a job, now and then."""

    def __init__(self, scheduler: Scheduler, points: float) -> None:
        """points: of the scheduler, on average, until the core is taken from somebody."""
        self.seconds = 0.0  # For which threads were without a core, so far
        self._scheduler, self._points, self._left = scheduler, points, 0
        self._await_point()

    def _await_point(self) -> None:
        at = self._scheduler.points + 1 + int(self._scheduler.random.expovariate(1.0 / self._points))
        insort(self._scheduler.events, (at, self._begin), key=lambda event: event[0])

    def _begin(self) -> None:
        """Count the statements of the thread that calls this, from now on."""
        random = self._scheduler.random
        self._await_point()
        self._left = 1 + int(random.expovariate(1.0 / MOST_STATEMENTS ** random.random()))
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if is_hvlike(frame):
                frame.f_trace = self._step
            frame = frame.f_back
        sys.settrace(self._enter)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._step if is_hvlike(frame) else None

    def _step(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event != "line":
            return self._step
        self._left -= 1
        me = self._scheduler.current
        if self._left > 0 or not may_wait(frame):
            return self._step
        sys.settrace(None)
        if me is not None and not me.is_over:
            seconds = without_a_core(self._scheduler.random)
            self.seconds += seconds
            self._scheduler.sleep_between(seconds)
        return None


def is_hvlike(frame: FrameType) -> bool:
    """Whether it belongs to hvlike. The body of a module does not count: it is run with the lock of its import."""
    code = frame.f_code
    return code.co_filename.startswith(HVLIKE) and code.co_name != "<module>"


def may_wait(frame: FrameType | None) -> bool:
    """Whether nobody below this frame has anything that others need to go on."""
    while frame is not None:
        name = frame.f_code.co_filename
        if any(each in name for each in NOWHERE) and frame.f_code.co_name not in BASES:
            return False
        frame = frame.f_back
    return True
