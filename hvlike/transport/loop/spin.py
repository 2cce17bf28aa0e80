"""The spin policy: how often a thread checks for an event before it sleeps, and how long it sleeps between polls.

    checks ...... doorbell, counters or MPI, nothing else runs on this core meanwhile
    then sleep .. until rung, until the next poll of MPI, or until the next health check (TICK_SECONDS)

Ranks that share cores ("crowded") give the core away between two checks. Where a doorbell will ring they check a few
times and sleep early. No doorbell rings for a message of another node, and a rank that sleeps sees it late: they check
as long as others do, except where the sockets of MPI wake them (socket_events.py): there they sleep at once. A rank is
crowded for good where the ranks of its machine, all containers together, have fewer cores than there are of them, and
for a while where its core is taken from it as it checks: by any other program. All times are in seconds.
"""

from __future__ import annotations

import math

CHECKS = 100  # Checks of the doorbell before a driver sleeps: they take about as long as waking a sleeper
COUNTER_CHECKS = 30  # Checks of a peer's counter before a coroutine yields: some 10 us, less than a turn of the loop
UNSHARED_SECONDS = 300e-6
"""How long a driver with a core of its own checks at most; the rank it waits for may just be waking on this core: then
the checks took 1 to 3 ms without this limit. Reductions take as long with 300 us; with 100 us they took longer."""

CROWDED_QUEUE_SECONDS = 2e-3
"""How long a thread whose rank shares its core drives a job that does not move before it leaves it to the loop. With a
core of its own: UNSHARED_SECONDS. Where another program takes the peer's core, sleeping brings the peer back sooner."""

BOARD_CHECKS = 1000  # Checks of a peer's entry by an inline allreduce before it wakes the peers that may sleep
RPC_CHECKS_FACTOR = 3  # How many times more checks a crowded rank makes while RPC runs
RPC_SECONDS = 2e-3
"""How long a thread checks while RPC runs: one that waits for an answer, or a background thread between two requests. A
core that sleeps for a moment wakes late, with empty caches: the same code then takes two to three times as long."""

INTERRUPTION_SECONDS = 200e-6  # After a longer check another thread wants the interpreter or the core: the checks end

HELD_UP_SECONDS = 500e-6
"""A check that takes longer was held up by another thread on this core: the system's turns last milliseconds."""
HELD_UP_WINDOW_SECONDS = 0.1
MOST_HELD_UP_SECONDS = 5e-3  # Of a window; a rank that is held up for longer is crowded
CROWDED_SECONDS = 1.0  # How long a rank is crowded after that; it looks again then

UNNOTIFIED_SECONDS = 50e-3
"""How long a driver checks for the next message of another node, for which no doorbell rings. MPI moves the bytes of a
message only while it is called: with 1 ms, 100 MiB over a fast link took a seventh longer. Where ranks share cores and
sockets wake them, 0: three ranks on two cores, a host each, took half as long for 13 MiB as with this."""

TICK_SECONDS = 0.25
TOLERANT_TICK_SECONDS = 0.05  # Where the job goes on without lost ranks

TURN_SECONDS = 1e-3  # How often a thread that advances one coroutine gives the rest of the loop a turn

PICK_UP_SECONDS = 50e-6  # A background thread that was rung leaves the loop to one that may be about to wait

SHORTEST_POLL_SECONDS = 20e-6
LONGEST_POLL_SECONDS = 1e-3
LONGEST_IDLE_POLL_SECONDS = 10e-3


class SpinPolicy:
    """How long the threads of one rank spin. All waits of a rank ask the same policy (`fabric.spin`)."""

    def __init__(self, *, crowded: bool, checks: int = CHECKS, tick_seconds: float = TICK_SECONDS) -> None:
        """crowded: ranks share cores. checks: of the doorbell before a sleep."""
        self.checks = checks
        self.tick_seconds = tick_seconds
        self.hears_sockets = False
        self._for_good = crowded
        self._window, self._held_up = 0.0, 0.0
        self._until = math.inf  # Where the rank is crowded for a while
        self._set(crowded=crowded)

    def _set(self, *, crowded: bool) -> None:
        self.crowded = crowded
        self.counter_checks = 1 if crowded else COUNTER_CHECKS
        self.board_checks = 0 if crowded else BOARD_CHECKS
        # How long a thread checks for a message of another node before it leaves that to the loop, or sleeps.
        self.network_seconds = 0.0 if crowded and self.hears_sockets else UNNOTIFIED_SECONDS
        self.queue_seconds = CROWDED_QUEUE_SECONDS if crowded else UNSHARED_SECONDS

    def hear_sockets(self, hears: bool) -> None:
        """Whether sockets wake a driver that sleeps when a message of another node comes."""
        self.hears_sockets = hears
        self._set(crowded=self.crowded)

    def look_again(self, now: float) -> None:
        """A wait begins now: has the rank, for all that is known, its core again?"""
        if now > self._until:
            self._until = math.inf
            self._set(crowded=self._for_good)

    def held_up(self, now: float, seconds: float) -> None:
        """A check that ended now has taken so long, and nothing was done in it."""
        if now - self._window > HELD_UP_WINDOW_SECONDS:
            self._window, self._held_up = now, 0.0
        self._held_up += seconds
        if self._held_up > MOST_HELD_UP_SECONDS and not self._for_good:
            self._until = now + CROWDED_SECONDS
            self._set(crowded=True)


class Spin:
    """The checks of one wait of a driver. Used again for the next wait, after `count` was set to 0."""

    __slots__ = ("_interruption", "_last", "_most", "_policy", "_serves", "_until", "count")

    def __init__(self, policy: SpinPolicy) -> None:
        self._policy = policy
        self.count = 0
        self._serves = False
        self._last = self._until = self._interruption = 0.0
        self._most: float = 0

    def begin(self, now: float, checks: int, *, serves: bool, unnotified: bool) -> None:
        """Decide when the checks of a wait end. checks: 0: sleep now. serves: RPC runs. unnotified: nothing rings."""
        self._policy.look_again(now)
        self._last = now
        self._serves = serves
        self._most, self._until, self._interruption = checks, 0.0, math.inf
        if unnotified:
            self._until = now + self._policy.network_seconds
        elif self._policy.crowded:
            self._most = checks * (RPC_CHECKS_FACTOR if serves else 1)
            self._until = math.inf if checks else 0.0
        elif checks and serves:
            self._most, self._until, self._interruption = math.inf, now + RPC_SECONDS, INTERRUPTION_SECONDS
        elif checks:
            self._until = now + UNSHARED_SECONDS

    def slept(self) -> None:
        """The time since the last check was no check that another thread has held up."""
        self._last = math.inf

    def goes_on(self, now: float, *, unnotified: bool) -> bool:
        """Whether to check once more before sleeping. unnotified: No doorbell rings, so only the time counts."""
        seconds = now - self._last
        self._last = now
        if seconds > HELD_UP_SECONDS and not self._serves:
            # While RPC runs, other threads of this process want the interpreter.
            self._policy.held_up(now, seconds)
        self.count += 1
        return now < self._until and (unnotified or (self.count <= self._most and seconds <= self._interruption))
