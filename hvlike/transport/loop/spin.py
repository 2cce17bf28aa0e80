"""The spin policy: how long a thread spins before it sleeps, and how long it sleeps between polls. In seconds."""

from __future__ import annotations

import math

TICK_SECONDS = 0.25
"""The longest a sleeper goes without a look at the health of the job."""

PICK_UP_SECONDS = 50e-6
"""How long a background thread that was rung leaves the loop to a thread that may be about to wait."""

SPIN_SECONDS = 300e-6
"""How long a waiter with a core of its own looks for what a rank of its node does; that one may be waking on this core.

With no limit but that of looks it was 1 to 3 ms. Reductions take as long with this one, with 100 us they took longer.
"""

RPC_SPIN_FACTOR = 3
"""As many times more looks while RPC runs, of ranks that share cores."""

RPC_SPIN_SECONDS = 2e-3
"""While RPC runs: how long who waits for an answer looks before it sleeps, and a background thread for the next request
where requests follow one another.

A core that sleeps for a moment wakes late and with empty caches: the same lines then take two to three times as long.
"""

INTERRUPTION_SECONDS = 200e-6
"""A look that takes longer shows that another thread wants the interpreter or the core: whoever looks goes to sleep."""

BUSY_POLL_SECONDS = 50e-3
"""How long a waiter with a core of its own looks for the next message of another node before it sleeps between looks.

Only who looks moves the bytes of a message: with 1 ms, 100 MiB over a fast link took a seventh longer.
"""

SHORTEST_POLL_SECONDS = 20e-6
LONGEST_POLL_SECONDS = 1e-3
LONGEST_IDLE_POLL_SECONDS = 10e-3


class SpinPolicy:
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


def new_spin_policy(now: float, spins: int, *, serves: bool, crowded: bool, busily: bool) -> SpinPolicy:
    """The look of a driver. spins: looks about as long as it takes to wake a sleeper; 0: only where nobody rings.

    serves: RPC runs. crowded: ranks share cores: a waiting one looks a few times, lets the others run in between, and
    sleeps. busily: nobody rings for what is waited for.
    """
    if crowded:
        return SpinPolicy(now, math.inf if spins else 0.0, spins * (RPC_SPIN_FACTOR if serves else 1), math.inf)
    if busily:
        return SpinPolicy(now, now + BUSY_POLL_SECONDS, spins, math.inf)
    if serves:
        return SpinPolicy(now, now + RPC_SPIN_SECONDS if spins else 0.0, math.inf, INTERRUPTION_SECONDS)
    return SpinPolicy(now, now + SPIN_SECONDS if spins else 0.0, spins, math.inf)
