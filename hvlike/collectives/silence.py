"""A rank that waits long asks whether the others are still there: what the coordinator cannot see, or when it is stuck.

The coordinator reports who has not asked for what others wait for. It sees nothing when all have asked and the data do
not come, and reports nothing when it is the rank that is stuck inside hvlike, or in a call that holds Python's lock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from math import inf

from hvlike.collectives.inspection import ANSWER_SECONDS, StallLimits
from hvlike.collectives.request import Key
from hvlike.errors import StalledError
from hvlike.observe.stacks import main_stack
from hvlike.transport.loop import Loop

logger = logging.getLogger("hvlike")

PING, PONG = "ping", "pong"


class Silence:
    """Asks the coordinator and the ranks of this node, seen from a member that waits."""

    def __init__(
        self,
        loop: Loop,
        rank: int,
        coordinator: int,
        neighbours: Collection[int],
        send: Callable[[int, str, float], None],
        look: Callable[[int], str],
        limits: StallLimits,
    ) -> None:
        """neighbours: the members on this node. look: what can be seen from here of a rank that does not answer."""
        self._loop = loop
        self._rank = rank
        self._coordinator = coordinator
        self._neighbours = neighbours
        self._send = send
        self._look = look
        self._limits = limits
        self._answers: dict[int, tuple[float, str]] = {}
        self._heard = -inf
        """When the last question was asked that the coordinator has answered."""

    @property
    def seconds(self) -> float | None:
        """How long to wait before the first question, and between questions; None: for ever."""
        return self._limits.shortest

    def hear(self, rank: int, answer: tuple[float, str]) -> None:
        """`rank` answers the question of that time; in the loop."""
        self._answers[rank] = answer
        if rank == self._coordinator:
            self._heard = answer[0]

    def check(self, key: Key, waited: float, agreed: bool, done: Callable[[], bool]) -> StalledError | None:
        """Ask, and report who is silent or where the others are; the error once the wait is past its limit.

        agreed: all ranks have asked for it, only the data are missing. done: the wait is over.
        """
        ranks = {self._coordinator, *(self._neighbours if agreed else ())} - {self._rank}
        asked = time.monotonic()
        self._loop.post(lambda: self._ask(ranks, asked), wake=False)
        self._loop.wait(lambda: done() or not self._silent(ranks, asked), ANSWER_SECONDS)
        silent = self._silent(ranks, asked)
        if done() or not (agreed or silent):
            return None
        lines = [f"  rank {rank} does not answer; {self._look(rank)}".removesuffix("; ") for rank in silent]
        if agreed:
            stacks = {rank: answer[1] for rank, answer in self._answers.items() if answer[0] == asked and answer[1]}
            lines += [f"  rank {rank} is at\n{stack}" for rank, stack in sorted(stacks.items())]
        text = "\n".join([self._describe(key, waited, agreed), *lines])
        if self._limits.report_seconds is not None and waited >= self._limits.report_seconds:
            logger.warning("%s", text)
        limit = self._limits.shutdown_seconds
        # A coordinator that was only busy has answered before: the wait may be a long one for good reasons.
        overdue = waited if agreed else min(waited, asked - self._heard)
        if not limit or overdue < limit:
            return None
        return StalledError(f"A wait took more than {limit:g} s (HVLIKE_STALL_SHUTDOWN_TIME_SECONDS): {text}")

    def _describe(self, key: Key, waited: float, agreed: bool) -> str:
        if agreed:
            return (
                f"rank {self._rank} waits for the data of {key[0]} {key[1]!r} since {waited:.0f} s, though all ranks "
                "have asked for it: a rank has stopped in the middle of it, or the network is down or very slow."
            )
        return (
            f"rank {self._rank} waits in {key[0]} {key[1]!r} since {waited:.0f} s, and nobody can say for whom: rank "
            f"{self._coordinator}, which coordinates, is stuck inside hvlike or in a call that holds Python's lock."
        )

    def _ask(self, ranks: Collection[int], asked: float) -> None:
        for rank in ranks:
            self._send(rank, PING, asked)

    def _silent(self, ranks: Collection[int], asked: float) -> list[int]:
        return sorted(rank for rank in ranks if self._answers.get(rank, (0.0, ""))[0] != asked)


def answer_of(asked: float) -> tuple[float, str]:
    """What this rank answers to the question of that time."""
    return asked, main_stack()
