"""On rank 0, while some ranks have left and others have not: where are the others? One report now and then.

Ranks may end at different times, one evaluates while the others are through: so this is a warning, unless waits have a
limit (HVLIKE_STALL_SHUTDOWN_TIME_SECONDS).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence

from hvlike.collectives.agreement import name_ranks
from hvlike.collectives.inspection import ANSWER_SECONDS, SHOWN_STACKS, StallLimits
from hvlike.errors import StalledError
from hvlike.transport.routine import Routine, Wait

logger = logging.getLogger("hvlike")


class Latecomers:
    """Asks and reports; used from inside the loop."""

    def __init__(self, limits: StallLimits, ask: Callable[[int], None], look: Callable[[int], str]) -> None:
        """ask: sends the question to a rank. look: what can be seen from here of a rank that does not answer."""
        self._limits = limits
        self._ask = ask
        self._look = look
        self._places: dict[int, str] = {}
        self._began = time.monotonic()
        self._next = self._began + (limits.shortest or 0.0)

    @property
    def is_due(self) -> bool:
        """Whether it is time to ask."""
        return self._limits.shortest is not None and time.monotonic() >= self._next

    def hear(self, rank: int, place: str) -> None:
        """The rank has said where it is."""
        self._places[rank] = place

    def inspect(self, missing: Callable[[], Collection[int]]) -> Routine[StalledError | None]:
        """Ask who is missing, and report; the error once the wait is past its limit."""
        self._places.clear()
        for rank in missing():
            self._ask(rank)
        until = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < until and not self._places.keys() >= set(missing()):
            yield Wait.BELL
        now = time.monotonic()
        self._next = now + (self._limits.shortest or 0.0)
        absent = sorted(missing())
        if not absent:
            return None
        waited = now - self._began
        text = (
            f"Other ranks have ended their program, or called shutdown(), {waited:.0f} s ago; {name_ranks(absent)} "
            f"{'has' if len(absent) == 1 else 'have'} not.\n" + "\n".join(self._describe(absent))
        )
        report, shutdown = self._limits.report_seconds, self._limits.shutdown_seconds
        if report is not None and waited >= report:
            logger.warning("%s", text)
        if not shutdown or waited < shutdown:
            return None
        return StalledError(f"A wait took more than {shutdown:g} s (HVLIKE_STALL_SHUTDOWN_TIME_SECONDS): {text}")

    def _describe(self, absent: Sequence[int]) -> list[str]:
        lines = []
        for rank in absent[:SHOWN_STACKS]:
            if rank not in self._places:
                lines.append(f"  rank {rank} does not answer; {self._look(rank)}".removesuffix("; "))
            elif self._places[rank]:
                lines.append(f"  rank {rank} is at\n{self._places[rank]}")
            else:
                lines.append(f"  rank {rank} waits inside hvlike")
        return lines
