"""A stretch of looks at the doorbell by a thread that has nothing else to do, until it is time to sleep."""

from __future__ import annotations

import math

from hvlike.transport import patience


class Look:
    """Ends by its number of looks, by time, or when a look has taken so long that something else must run here."""

    __slots__ = ("_interruption", "_last", "_most", "_until", "count")

    def __init__(self, now: float, until: float, most: float, interruption: float) -> None:
        """now, until: seconds of one clock. most: looks. interruption: seconds; math.inf where it does not matter."""
        self.count = 0
        self._last = now
        self._until = until
        self._most = most
        self._interruption = interruption

    def goes_on(self, now: float, busily: bool) -> bool:
        """Whether to look once more before sleeping. busily: nobody rings, so time alone counts."""
        interrupted = now > self._last + self._interruption
        self._last = now
        self.count += 1
        return now < self._until and (busily or (self.count <= self._most and not interrupted))


def new_look(now: float, spins: int, *, serves: bool, crowded: bool, busily: bool) -> Look:
    """The look of a driver. spins: looks about as long as it takes to wake a sleeper; 0: only where nobody rings.

    serves: RPC runs. crowded: ranks share cores: a waiting one looks a few times, lets the others run in between, and
    sleeps. busily: nobody rings for what is waited for.
    """
    if crowded:
        return Look(now, math.inf if spins else 0.0, spins * (patience.LOOKS_FOR_AN_ANSWER if serves else 1), math.inf)
    if busily:
        return Look(now, now + patience.BUSY_POLL, spins, math.inf)
    if serves:
        return Look(now, now + patience.HOT_LOOK if spins else 0.0, math.inf, patience.INTERRUPTION)
    return Look(now, now + patience.SPIN if spins else 0.0, spins, math.inf)
