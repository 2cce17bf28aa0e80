"""Who goes on when, in a simulated job: one thread of all its ranks at a time, chosen by a seed, in virtual time.

Every simulated thread is a thread of the system, and waits on a lock of its own until it is handed the turn. Whoever
has the turn keeps it until it blocks, ends, or comes to a point (`switch`) at which the seed lets another one go on.
Virtual time passes by a little at every point, and jumps to the next limit of time when nobody can go on.

    runnable   waits for the turn
    blocked    waits for a condition, which is looked at when its key is touched, or for a moment of virtual time
    ended      has returned, or has been taken out of the job
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Hashable
from heapq import heappop, heappush

from support.simulation.machine.simulated_thread import Hang, JobEnded, SimulatedThread, Stuck

TICK_SECONDS = 4e-6  # What passes at a point, or when somebody looks at the clock: Python takes about as long
POLLED = "polled"
CHANGED = "changed"
# What follows lets much time pass in few points. Any system may do so.
LOOKS_BEFORE_REST = 2  # At the clock: hvlike's loop does so twice in each turn
SHORTEST_REST_SECONDS, LONGEST_REST_SECONDS = 10e-6, 200e-6
"""How long who checks in a loop rests, while others change nothing: as if the system had taken its core for so long.
hvlike takes a check of more than 500 us for one that another program has held up."""
SHORTEST_LATE_SECONDS, LONGEST_LATE_SECONDS = 1e-3, 20e-3
"""How late who sleeps for short times is woken, while others change nothing."""
SHORTEST_SECONDS, LONGEST_SECONDS = 10e-6, 5e-3
"""For how long a thread is without a core."""
STUCK_SECONDS = 50.0
MOST_POINTS = 3_000_000  # After so many a job counts as one that never ends


def without_a_core(draw: random.Random) -> float:
    """For so long a thread gets none, where many share it."""
    return SHORTEST_SECONDS * (LONGEST_SECONDS / SHORTEST_SECONDS) ** draw.random()


class Scheduler:
    """See the head of this file. All methods but `run` are called by the thread that has the turn."""

    def __init__(
        self,
        seed: int,
        *,
        points_per_switch: float = 20.0,
        trace: Callable[[str], None] | None = None,
        most_seconds: float = math.inf,
        most_points: int = MOST_POINTS,
        tick_seconds: float = TICK_SECONDS,
    ) -> None:
        """points_per_switch: how many points a thread passes on average before another one goes on."""
        self.random = random.Random(seed)
        self.now = 0.0
        self.points = 0
        self.longest_rest = 0.0  # For how long nothing has changed, but that somebody looked around, at most
        self.threads: list[SimulatedThread] = []
        self.on_rank: Callable[[int], object] = bool
        """Called with a rank that gets the turn from another one."""
        self.fence: Callable[[], object] = bool
        """What the rank that has the turn has written is visible to all, and what it reads is not older than this."""
        self.acquire: Callable[[], object] = bool
        """What the rank that has the turn reads is not older than this."""
        self.holds: list[tuple[int, int, float]] = []
        """After so many points a rank is held up for so long: by another program, by a signal. Sorted."""
        self.acts: dict[tuple[int, int], float] = {}
        """By rank, and by how often it has done what others can see: it is held up just then, for so long."""
        self.events: list[tuple[int, Callable[[], object]]] = []
        """What is called after so many points, by whoever has the turn. Sorted."""
        self.late_wakes = 0.0  # So many of those who wake get a core only after a while; others of their rank go on
        self.away_seconds = 0.0  # For which they had none, so far
        self.changes = 0  # Of anything that others may wait for, so far
        self._moved_with, self._moved_at = 0, 0.0  # The last change that was seen to have come, and when
        self.next_event: Callable[[int], float] = lambda rank: math.inf
        """When MPI has something for a rank that it would find."""
        self.current: SimulatedThread | None = None
        self.hang: str | None = None
        self._most_seconds, self._most_points, self._tick = most_seconds, most_points, tick_seconds
        self._rate = 1.0 / points_per_switch
        self._left = self._draw()
        self._trace = trace
        self._over = threading.Event()
        self._living = 0  # Have not ended, and are not lost
        self._lost: list[SimulatedThread] = []
        self._acted: dict[int, int] = {}  # By rank
        self._runnable: list[SimulatedThread] = []
        self._blocked: dict[Hashable, list[SimulatedThread]] = {}  # By key
        self._touched: list[Hashable] = []
        self._limits: list[tuple[float, int, SimulatedThread, int]] = []  # A heap
        self._numbers = self._changes_told = 0
        self._unwinding: list[SimulatedThread] = []  # Are over, and have not ended yet
        self._last_rank = -1

    # -- for the job ------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """The rank that has the turn."""
        assert self.current is not None
        return self.current.rank

    def add(self, rank: int, name: str) -> SimulatedThread:
        """A thread that is to call `live` from a thread of the system; it begins when it gets its first turn."""
        thread = SimulatedThread(rank, name)
        # One that is started while its starter unwinds has no life of its own.
        thread.is_over = self.current is not None and self.current.is_over
        self.threads.append(thread)
        (self._unwinding if thread.is_over else self._runnable).append(thread)
        self._living += 1
        return thread

    def live(self, thread: SimulatedThread, run: Callable[[], None]) -> None:
        """All that a thread does, in the thread of the system that stands for it."""
        thread.ident = threading.get_ident()
        thread.turn.acquire()
        try:
            if not thread.is_over:
                run()
        except JobEnded:
            pass
        finally:
            thread.ended = True
            self._living -= not thread.is_lost
            if thread.is_over:
                self._unwinding.remove(thread)
            self.touch(thread)
            self._hand_on(None)

    def run(self) -> None:
        """Let the job go on until all of its threads have ended. Raises: Hang, Stuck."""
        self._hand_on(None)
        points = -1
        while not self._over.wait(STUCK_SECONDS):
            if points == self.points and self.current is not None:
                self.on_rank = bool  # What belongs to ranks is put back before it goes on
                places = " < ".join(reversed(self.current.frames())) or "its thread of the system has ended"
                raise Stuck(f"{self.current} keeps the turn at point {points}: {places}")
            points = self.points
        self.current = None
        if self.hang is not None:
            raise Hang(self.hang)

    def say(self, text: str) -> None:
        """Note what happens."""
        if self._trace is not None:
            self._trace(f"{self.now * 1e6:12.1f} {self.current}: {text}")

    # -- points -----------------------------------------------------------------------------------

    def switch(self, what: str) -> None:
        """A point at which another thread may go on."""
        self.now += self._tick
        self.points += 1
        self._left -= 1
        if self._left <= 0:
            self._pass_on(what)

    def hurry(self) -> None:
        """Another thread goes on at the next point."""
        self._left = 0

    def give_way(self) -> None:
        """A point at which another thread goes on, if one can: who has waited has seen nothing new so far."""
        self.now += self._tick
        self.points += 1
        if self._runnable or self._touched or self._left <= 1:
            self._pass_on("yield")

    def _pass_on(self, what: str) -> None:
        me = self.current
        self._left = self._draw()
        if me is None:
            return
        if self.points > self._most_points or self.now > self._most_seconds:
            self._note_hang(f"the job goes on after {self.points} points")
            raise JobEnded
        while self.holds and self.points >= self.holds[0][0]:
            _, rank, seconds = self.holds.pop(0)
            self.hold(rank, seconds)
        me.what = what
        while self.events and self.points >= self.events[0][0]:
            self.events.pop(0)[1]()
        if not me.is_over:
            self._runnable.append(me)
        self._hand_on(me)

    def block(self, ready: Callable[[], bool], until: float | None, what: str, key: Hashable = None) -> bool:
        """Wait until the condition holds, or until a moment; whether it holds.

        key: what is touched when the condition may have become true. None: it never does. POLLED: it is looked at each
        time that the turn is handed on.
        """
        me = self.current
        if me is None:
            assert ready(), f"{what} outside of the job"
            return True
        self.now += self._tick
        self.fence()
        while not ready():
            if until is not None and until <= self.now:
                return False
            if me.is_over:
                raise JobEnded
            me.condition, me.key, me.what = ready, key, what
            me.blocks += 1
            self._blocked.setdefault(key, []).append(me)
            if until is not None:
                self._limit(me, until)
            self._hand_on(me)
        self.acquire()
        return True

    def touch(self, key: Hashable) -> None:
        """What some wait for may have come true: it is looked at before the turn is handed on."""
        if key in self._blocked:
            self._touched.append(key)

    def change(self) -> None:
        """Something has changed that others may wait for."""
        self.changes += 1
        if self.current is not None:
            self.current.own_changes += 1

    def act(self) -> None:
        """Who has the turn does what others can see, or will see."""
        if self.acts and self.current is not None:
            rank = self.current.rank
            self._acted[rank] = self._acted.get(rank, 0) + 1
            seconds = self.acts.pop((rank, self._acted[rank]), None)
            if seconds is not None:
                self.hold(rank, seconds)
                self.hurry()

    def clock(self) -> float:
        """Virtual seconds; to look at the clock takes some."""
        me = self.current
        self.now += self._tick
        if me is None:
            return self.now
        seen = self.changes - me.own_changes
        if me.seen != seen:
            me.seen, me.looks, me.rest_seconds = seen, 0, SHORTEST_REST_SECONDS
        elif me.looks < LOOKS_BEFORE_REST:
            me.looks += 1
        else:
            me.looks = 0
            until = min(self.now + me.rest_seconds, self.next_event(me.rank))
            me.rest_seconds = min(2 * me.rest_seconds, LONGEST_REST_SECONDS)
            self.block(lambda: seen != self.changes - me.own_changes, until, "checks", CHANGED)
        return self.now

    def sleep_for(self, ready: Callable[[], bool], until: float, what: str, key: Hashable) -> bool:
        """`block` for who looks around now and then: it wakes late where others change nothing meanwhile."""
        me = self.current
        if me is None or self.block(ready, until, what, key):
            return True
        seen = self.changes - me.own_changes
        if me.seen_asleep != seen:
            me.seen_asleep, me.late_seconds = seen, SHORTEST_LATE_SECONDS
            return False
        until = min(self.now + me.late_seconds, self.next_event(me.rank))
        me.late_seconds = min(2 * me.late_seconds, LONGEST_LATE_SECONDS)
        self.block(lambda: ready() or seen != self.changes - me.own_changes, until, what, CHANGED)
        return ready()

    def sleep(self, seconds: float) -> None:
        """Let so much time pass."""
        self.block(_never, self.now + seconds, "sleep")
        self._moved_at = self.now

    def sleep_between(self, seconds: float) -> None:
        """The thread that has the turn is without a core for so long, wherever it is; others of its rank go on."""
        self.block(_never, self.now + seconds, "is without a core")

    def hold(self, rank: int, seconds: float) -> None:
        """Let no thread of a rank go on for so long."""
        for thread in self.threads:
            if thread.rank == rank:
                thread.held_until = self.now + seconds

    def lose(self, rank: int) -> None:
        """The process of a rank is gone: none of its threads goes on."""
        self.say(f"rank {rank} is lost")
        for thread in self.threads:
            if thread.rank == rank and not (thread.ended or thread.is_lost or thread.is_over):
                self._take_out(thread)
                thread.is_lost = True
                self._lost.append(thread)
                self._living -= 1
        if self.current is not None and self.current.rank == rank:
            self._hand_on(self.current)

    # -- the turn ---------------------------------------------------------------------------------

    def _draw(self) -> int:
        return 1 + int(self.random.expovariate(self._rate))

    def _hand_on(self, me: SimulatedThread | None) -> None:
        """Give the turn to a thread that can go on, this one perhaps; me: comes back when it has the turn again."""
        thread = self._choose()
        if thread is None:
            self._over.set()
            return
        if thread is not me:
            self.current = thread
            if thread.rank != self._last_rank:
                self._last_rank = thread.rank
                self.on_rank(thread.rank)
            thread.turn.release()
            if me is None:
                return
            me.turn.acquire()
        if me is not None and me.is_over:
            raise JobEnded

    def _choose(self) -> SimulatedThread | None:
        runnable, limits = self._runnable, self._limits
        while True:
            if self._unwinding:
                return self._unwinding[0]
            if POLLED in self._blocked:
                self._touched.append(POLLED)
            if CHANGED in self._blocked and self._changes_told != self.changes:
                self._changes_told = self.changes
                self._touched.append(CHANGED)
            while self._touched:
                for thread in tuple(self._blocked.get(self._touched.pop(), ())):
                    if thread.condition is not None and thread.condition():
                        self._unblock(thread)
            if not self._living:
                if not self._lost:
                    return None
                self._end(self._lost)
                continue
            while limits and limits[0][0] <= self.now:
                _, _, thread, blocks = heappop(limits)
                if thread.blocks == blocks and thread.condition is not None:
                    self._unblock(thread)
            if runnable:
                place = int(self.random.random() * len(runnable)) if len(runnable) > 1 else 0
                thread = runnable[place]
                runnable[place] = runnable[-1]
                runnable.pop()
                if thread.held_until <= self.now:
                    return thread
                thread.condition, thread.key = _never, None
                thread.blocks += 1
                self._blocked.setdefault(None, []).append(thread)
                self._limit(thread, thread.held_until)
            elif limits:
                next_moment, _, thread, blocks = limits[0]
                if thread.blocks == blocks and thread.condition is not None:
                    if self._moved_with != self.changes:
                        self._moved_with, self._moved_at = self.changes, self.now
                    self.longest_rest = max(self.longest_rest, next_moment - self._moved_at)
                    self.now = max(self.now, next_moment) + self._tick
                else:
                    heappop(limits)
            else:
                self._note_hang("nobody can go on")

    def _limit(self, thread: SimulatedThread, until: float) -> None:
        self._numbers += 1
        heappush(self._limits, (until, self._numbers, thread, thread.blocks))

    def _unblock(self, thread: SimulatedThread) -> None:
        waiting = self._blocked[thread.key]
        waiting.remove(thread)
        if not waiting:
            del self._blocked[thread.key]
        thread.condition = None
        if self.late_wakes and self.random.random() < self.late_wakes:
            seconds = without_a_core(self.random)
            self.away_seconds += seconds
            thread.held_until = max(thread.held_until, self.now + seconds)
        self._runnable.append(thread)

    def _end(self, threads: list[SimulatedThread]) -> None:
        """They unwind, and do nothing else."""
        for thread in threads:
            if not (thread.ended or thread.is_over):
                thread.is_over = True
                self._take_out(thread)
                self._unwinding.append(thread)
        self._lost = []

    def _take_out(self, thread: SimulatedThread) -> None:
        """It waits for nothing, not for the turn either."""
        if thread.condition is not None:
            self._unblock(thread)
        if thread in self._runnable:
            self._runnable.remove(thread)

    def _note_hang(self, why: str) -> None:
        living = [each for each in self.threads if not (each.ended or each.is_lost)]
        lines = [line for each in living for line in (f"{each}: {each.what}", *each.stack())]
        self.hang = self.hang or f"{why} at {self.now:.6f} s\n" + "\n".join(lines)
        self._end(self.threads)


def _never() -> bool:
    return False
