"""Who goes on when, in a simulated job: one thread of all its ranks at a time, chosen by a seed, in virtual time.

Every simulated thread is a thread of the system, and waits on a lock of its own until it is handed the turn. Whoever
has the turn keeps it until it blocks, ends, or comes to a point (`switch`) at which the seed lets another one go on.
Virtual time passes by a little at every point, and jumps to the next limit of time when nobody can go on.

    ready     waits for the turn
    blocked   waits for a condition, or for a moment of virtual time; whoever hands the turn on looks for it
    ended     has returned, or has been taken out of the job
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable

TICK_SECONDS = 4e-6  # What passes at a point, or when somebody looks at the clock: Python takes about as long
MOST_POINTS = 3_000_000  # After so many a job counts as one that never ends


class JobEnded(BaseException):
    """Ends a thread of a job that is over: a hang was found, or its process is gone."""


class Hang(Exception):
    """Nobody can go on, or the job never ends."""


class SimulatedThread:
    """One thread of one rank."""

    def __init__(self, number: int, rank: int, name: str) -> None:
        self.number, self.rank, self.name = number, rank, name
        self.turn = threading.Lock()
        self.turn.acquire()
        self.condition: Callable[[], bool] | None = None
        self.until = math.inf
        self.what = "has not begun"
        self.ended = False
        self.held_until = 0.0
        self.is_lost = False
        """Its process is gone: it does nothing any more, and unwinds when all others have ended."""
        self.is_over = False
        """The job is over: it raises JobEnded when it has the turn."""

    def __str__(self) -> str:
        return f"rank {self.rank} {self.name}"


class Scheduler:
    """See the head of this file. All methods but `run` are called by the thread that has the turn."""

    def __init__(
        self,
        seed: int,
        *,
        points_per_switch: float = 20.0,
        trace: Callable[[str], None] | None = None,
        most_seconds: float = math.inf,
    ) -> None:
        """points_per_switch: how many points a thread passes on average before another one goes on."""
        self.random = random.Random(seed)
        self.now = 0.0
        self.points = 0
        self.longest_rest = 0.0  # For how long nobody could go on, at most
        self.threads: list[SimulatedThread] = []
        self.on_rank: Callable[[int], object] = bool
        """Called with a rank that gets the turn from another one."""
        self.holds: list[tuple[int, int, float]] = []
        """After so many points a rank is held up for so long: by another program, by a signal. Sorted."""
        self.events: list[tuple[int, Callable[[], object]]] = []
        """What is called after so many points, by whoever has the turn. Sorted."""
        self.current: SimulatedThread | None = None
        self.hang: str | None = None
        self._most_seconds = most_seconds
        self._rate = 1.0 / points_per_switch
        self._left = self._draw()
        self._trace = trace
        self._over = threading.Event()

    # -- for the job ------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """The rank that has the turn."""
        assert self.current is not None
        return self.current.rank

    def add(self, rank: int, name: str) -> SimulatedThread:
        """A thread that is to call `live` from a thread of the system; it begins when it gets its first turn."""
        thread = SimulatedThread(len(self.threads), rank, name)
        # One that is started while its starter unwinds has no life of its own.
        thread.is_over = self.current is not None and self.current.is_over
        self.threads.append(thread)
        return thread

    def live(self, thread: SimulatedThread, run: Callable[[], None]) -> None:
        """All that a thread does, in the thread of the system that stands for it."""
        thread.turn.acquire()
        try:
            if not thread.is_over:
                run()
        except JobEnded:
            pass
        finally:
            thread.ended = True
            self._hand_on(None)

    def run(self) -> None:
        """Let the job go on until all of its threads have ended. Raises: Hang."""
        self._hand_on(None)
        self._over.wait()
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
        me = self.current
        if me is None:
            return
        self.now += TICK_SECONDS
        self.points += 1
        self._left -= 1
        if self._left <= 0:
            self._left = self._draw()
            if self.points > MOST_POINTS or self.now > self._most_seconds:
                self._note_hang(f"the job goes on after {self.points} points")
                raise JobEnded
            while self.holds and self.points >= self.holds[0][0]:
                _, rank, seconds = self.holds.pop(0)
                self.hold(rank, seconds)
            me.what = what
            while self.events and self.points >= self.events[0][0]:
                self.events.pop(0)[1]()
            self._hand_on(me)

    def block(self, ready: Callable[[], bool], until: float | None, what: str) -> bool:
        """Wait until the condition holds, or until a moment; whether it holds."""
        me = self.current
        if me is None:
            assert ready(), f"{what} outside of the job"
            return True
        self.now += TICK_SECONDS
        if ready():
            return True
        me.condition, me.until, me.what = ready, math.inf if until is None else until, what
        self._hand_on(me)
        me.condition = None
        return ready()

    def clock(self) -> float:
        """Virtual seconds; to look at the clock takes some."""
        self.now += TICK_SECONDS
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let so much time pass."""
        self.block(_never, self.now + seconds, "sleep")

    def hold(self, rank: int, seconds: float) -> None:
        """Let no thread of a rank go on for so long."""
        for thread in self.threads:
            if thread.rank == rank:
                thread.held_until = self.now + seconds

    def lose(self, rank: int) -> None:
        """The process of a rank is gone: none of its threads goes on."""
        self.say(f"rank {rank} is lost")
        for thread in self.threads:
            if thread.rank == rank:
                thread.is_lost = True
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
            before, self.current = self.current, thread
            if before is None or before.rank != thread.rank:
                self.on_rank(thread.rank)
            thread.turn.release()
            if me is None:
                return
            me.turn.acquire()
        if me is not None and me.is_over:
            raise JobEnded

    def _choose(self) -> SimulatedThread | None:
        while True:
            living = [each for each in self.threads if not (each.ended or each.is_lost)]
            if not living:
                return self._next_lost()
            over = [each for each in living if each.is_over]
            if over:
                # They only have to unwind.
                return over[0]
            able = [each for each in living if self._can_go_on(each)]
            if able:
                return able[0] if len(able) == 1 else self.random.choice(able)
            moments = [max(each.until, each.held_until) for each in living if each.until < math.inf]
            moments += [each.held_until for each in living if each.held_until > self.now]
            if not moments:
                self._note_hang("nobody can go on")
                continue
            next_moment = min(moments)
            self.longest_rest = max(self.longest_rest, next_moment - self.now)
            self.now = max(self.now, next_moment) + TICK_SECONDS

    def _can_go_on(self, thread: SimulatedThread) -> bool:
        if thread.held_until > self.now:
            return False
        return thread.condition is None or thread.until <= self.now or thread.condition()

    def _next_lost(self) -> SimulatedThread | None:
        """A thread of a process that is gone, which has to unwind."""
        lost = [each for each in self.threads if not each.ended]
        for each in lost:
            each.is_over = True
        return lost[0] if lost else None

    def _note_hang(self, why: str) -> None:
        lines = [f"{each}: {each.what}" for each in self.threads if not (each.ended or each.is_lost)]
        self.hang = self.hang or f"{why} at {self.now:.6f} s\n" + "\n".join(lines)
        for each in self.threads:
            each.is_over = True


def _never() -> bool:
    return False
