"""Asking ranks where they are, and what follows from a wait that is too long.

A rank answers from its loop, which runs also while the user's program computes. No answer means that it has stopped, or
is in a call that holds Python's lock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from math import inf

from hvlike.errors import StalledError
from hvlike.observe.stacks import main_stack

logger = logging.getLogger("hvlike")

ANSWER_SECONDS = 2.0  # How long ranks have to answer
SHOWN_STACKS = 4  # A report shows the stacks of at most this many ranks
Answer = tuple[float, str]  # When it was asked, by the asker's clock; the main thread's stack, empty inside hvlike


@dataclass(frozen=True)
class StallLimits:
    report_seconds: float | None = 60.0  # After how long a report is made, and how long until the next; None: never
    shutdown_seconds: float = 0.0  # After how long everything in the process set ends with StalledError; 0: never

    @property
    def shortest(self) -> float | None:
        """After how long a wait is worth a question; None: never."""
        limits = (self.report_seconds, self.shutdown_seconds or None)
        return min((each for each in limits if each is not None), default=None)

    def judge(self, text: str, waited: float, overdue: float | None = None) -> StalledError | None:
        """Log a wait that is worth a report; the error past its limit, for which only `overdue` seconds may count."""
        if self.report_seconds is not None and waited >= self.report_seconds:
            logger.warning("%s", text)
        limit = self.shutdown_seconds
        if not limit or (waited if overdue is None else overdue) < limit:
            return None
        return StalledError(f"A wait took more than {limit:g} s (HVLIKE_STALL_SHUTDOWN_TIME_SECONDS): {text}")


class StatusQuery:
    def __init__(self, ask: Callable[[int, float], None], look: Callable[[int], str]) -> None:
        """ask: sends the question to a rank, in the loop. look: what can be seen from here of a rank that is silent."""
        self._ask = ask
        self._look = look
        self._ranks: frozenset[int] = frozenset()
        self._answers: dict[int, Answer] = {}
        self.asked = -inf  # When the last question was asked, in seconds of time.monotonic()

    def prepare(self, ranks: Iterable[int]) -> None:
        """A new question to these ranks; `send` asks it. Any thread."""
        self._ranks = frozenset(ranks)
        self.asked = time.monotonic()

    def send(self) -> None:
        for rank in self._ranks:
            self._ask(rank, self.asked)

    def hear(self, rank: int, answer: Answer) -> None:
        self._answers[rank] = answer

    def heard_at(self, rank: int) -> float:
        return self._answers.get(rank, (-inf, ""))[0]

    def silent(self) -> list[int]:
        return sorted(rank for rank in self._ranks if self.heard_at(rank) != self.asked)

    def describe(self, ranks: Collection[int]) -> list[str]:
        """A line for each of these ranks, with the stack of its main thread where it is not in hvlike."""
        return [self._line(rank) for rank in sorted(ranks)[:SHOWN_STACKS]]

    def _line(self, rank: int) -> str:
        asked, stack = self._answers.get(rank, (-inf, ""))
        if asked != self.asked:
            return describe_silent(rank, self._look(rank))
        return f"  rank {rank} is at\n{stack}" if stack else f"  rank {rank} waits inside hvlike"


def describe_silent(rank: int, seen: str) -> str:
    """The line of a rank that does not answer. seen: what can be seen of it from here."""
    return f"  rank {rank} does not answer; {seen}".removesuffix("; ")


def answer_of(asked: float) -> Answer:
    return asked, main_stack()
