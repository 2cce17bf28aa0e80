"""A thread of a simulated rank, and how simulated jobs end that do not end by themselves."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Hashable
from pathlib import Path

import hvlike

HVLIKE = f"{Path(hvlike.__file__).parent}/"


class JobEnded(BaseException):
    """Ends a thread of a job that is over: a hang was found, or its process is gone."""


class Hang(Exception):
    """Nobody can go on, or the job never ends."""


class Stuck(Exception):
    """Whoever has the turn comes to no point for a long real time: it waits for what is not simulated."""


class SimulatedThread:
    """One thread of one rank."""

    def __init__(self, rank: int, name: str) -> None:
        self.rank, self.name = rank, name
        self.turn = threading.Lock()
        self.turn.acquire()
        self.condition: Callable[[], bool] | None = None  # While it is blocked
        self.key: Hashable = None
        self.blocks = 0  # How often it has been blocked: limits of time of earlier times do not count
        self.what = "has not begun"
        self.ident = 0  # Of the thread of the system
        self.ended = False
        self.held_until = 0.0
        self.own_changes = 0  # Of what others can see
        self.seen = self.seen_asleep = -1  # Changes of others, when it looked at the clock last, and slept
        self.looks = 0  # How often it has looked at the clock since
        self.rest_seconds = self.late_seconds = 0.0  # See Scheduler.clock, sleep_for
        self.is_lost = False
        """Its process is gone: it does nothing any more, and unwinds when all others have ended."""
        self.is_over = False
        """The job is over: it raises JobEnded when it has the turn."""

    def stack(self) -> list[str]:
        """Where it is, outermost first, without what belongs to the simulation."""
        return [f"    {each.removeprefix(HVLIKE)}" for each in self.frames() if each.startswith(HVLIKE)]

    def frames(self) -> list[str]:
        """Where its thread of the system is, outermost first; nothing if that has ended."""
        frame = sys._current_frames().get(self.ident)
        places = [] if frame is None else traceback.extract_stack(frame)
        return [f"{each.filename}:{each.lineno} {each.name}" for each in places]

    def __str__(self) -> str:
        return f"rank {self.rank} {self.name}"
