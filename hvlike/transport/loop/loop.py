"""The progress loop of a process: the only code that calls MPI after init.

The thread that waits drives. A thread that waits for a task takes the drive lock, advances every coroutine that can
advance, and sleeps on the doorbell when none can. Other waiting threads sleep until their task is done or the lock is
free. A background thread (thread_pool.py) drives only when no thread waits, and only while something is running: an
idle process sleeps on its doorbell.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from hvlike.errors import ShutdownError, StateError
from hvlike.transport.loop import spin
from hvlike.transport.loop.coroutine import Coroutine, Task, Wait
from hvlike.transport.loop.spin import SpinPolicy, new_spin_policy
from hvlike.transport.loop.thread_pool import ThreadPool
from hvlike.transport.memory.doorbell import Doorbell

T = TypeVar("T")


class Loop:
    """Advances routines until they end; see the head of this file for who drives."""

    def __init__(self, bell: Doorbell, *, spins: int, crowded: bool, remote: bool, tick: Callable[[], None]) -> None:
        """Start the thread, asleep.

        spins: looks before a driver sleeps. crowded: there are fewer cores than ranks. remote: traffic may come that
        rings no bell. tick: the health check, called a few times a second, asleep or not.
        """
        self._bell = bell
        self._spins = spins
        self._crowded = crowded
        self._remote = remote
        self._tick = tick
        self._inbox: deque[Callable[[], None]] = deque()
        self._sources: list[Callable[[bool], Wait]] = []
        self._half_done: list[Callable[[], bool]] = []
        self._tasks: list[Task[Any]] = []
        self._lock = threading.Lock()
        self._changed = threading.Condition()
        self._waiters = 0
        self._driver = 0
        self._in_background = False
        self._unheard = False
        self._closing = False
        self._wait = Wait.NOTIFY
        self._next_tick = 0.0
        self._due = math.inf
        self._on_due: Callable[[float], float] = _nothing_due
        self._failure: BaseException | None = None
        self.thread_pool = ThreadPool(self._listen, self._summon)

    # -- from any thread ----------------------------------------------------------------------

    def add_source(self, source: Callable[[bool], Wait], is_half_done: Callable[[], bool]) -> None:
        """Have `source(rung)` called at every turn; it says how it waits, AGAIN if it did something.

        is_half_done: tells a driver that leaves whether something has begun there for whose end nobody will ring.
        """
        self._sources.append(source)
        self._half_done.append(is_half_done)

    def post(self, action: Callable[[], None], *, wake: bool = True) -> None:
        """Run `action` in the loop soon. `wake=False`: the caller is about to wait and so to drive."""
        self._inbox.append(action)
        if wake:
            self._bell.ring()

    def pin(self, core: int) -> None:
        """Run the background thread on one core from now on. Raises: OSError for a core that is not there."""
        os.sched_setaffinity(self.thread_pool.first or 0, {core})

    def perform(self, action: Callable[[], None]) -> None:
        """Run `action` in the loop: at once where nobody drives it, else soon. From any thread; never blocks."""
        if self._driver == threading.get_ident() or not self._lock.acquire(blocking=False):
            self.post(action)
            return
        try:
            self._enter()
            while self._inbox:
                self._inbox.popleft()()
            action()
        finally:
            self._leave()

    def watch_clock(self, on_due: Callable[[float], float]) -> None:
        """Have `on_due(now)` called in the loop when the time given to `due_at` has come; it returns the next time."""
        self._on_due = on_due

    def due_at(self, when: float) -> None:
        """Something is due at `when`, in seconds of time.monotonic(). From inside the loop."""
        if when < self._due:
            self._due = when
            self._watch_clock_elsewhere()

    def start(
        self, routine: Coroutine[T], after: Callable[[Task[T]], None] | None = None, *, wake: bool = True
    ) -> Task[T]:
        """Advance `routine` until it ends; `after(task)` is then called in the loop."""
        task = Task(routine, after)
        self.post(lambda: self._enlist(task), wake=wake)
        return task

    def begin(self, routine: Coroutine[Any]) -> None:
        """`start` from inside the loop, with the first step at once."""
        task = Task(routine, None)
        self._tasks.append(task)
        self._step(task)

    def wait(self, done: Callable[[], bool], seconds: float | None = None) -> bool:
        """Block until `done()`, driving the loop if nobody does; False when `seconds` ran out first."""
        deadline = None if seconds is None else time.monotonic() + seconds
        if self._driver == threading.get_ident():
            raise StateError(
                "hvlike was called from inside its own progress loop (a finaliser or signal handler that ran there): "
                "only start operations from such a place, never wait for them"
            )
        while not done():
            if self._failure is not None:
                raise self._failure
            remaining = None if deadline is None else deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                return False
            if self._lock.acquire(blocking=False):
                self._drive_as_waiter(done, deadline)
            else:
                self._follow(done, remaining)
        if self._unheard:
            # Who left the loop to this thread had been rung for something else.
            self._unheard = False
            self._bell.ring()
        return True

    def turn(self) -> None:
        """Advance what can be advanced, once, unless somebody drives already. Never blocks."""
        if self._driver != threading.get_ident() and self._lock.acquire(blocking=False):
            try:
                self._enter()
                # Who came before may have slept through a ring: look as if there had been one.
                self._bell.rung()
                self._advance(True)
            finally:
                self._leave()

    def close(self) -> None:
        """Stop the threads and fail what is still running with ShutdownError."""
        self._closing = True
        self._bell.ring()
        self.thread_pool.close()
        with self._lock:
            while self._inbox:
                self._inbox.popleft()()
            for task in list(self._tasks):
                self._end(task, None, ShutdownError("hvlike was shut down while this was in flight"))

    def _enlist(self, task: Task[Any]) -> None:
        # A task may have been cancelled before it began; it would look like one that always has something to do.
        if not task.done:
            self._tasks.append(task)

    def cancel(self, task: Task[Any], error: BaseException) -> None:
        """End `task` with `error`, from inside the loop."""
        if not task.done:
            task.routine.close()
            self._end(task, None, error)

    # -- driving ------------------------------------------------------------------------------

    def _drive_as_waiter(self, done: Callable[[], bool], deadline: float | None) -> None:
        try:
            self._enter()
            self._drive(done, deadline, self._spins)
        finally:
            self._leave()

    def _follow(self, done: Callable[[], bool], remaining: float | None) -> None:
        """Somebody else drives: wait until the task is done or the lock may be free."""
        with self._changed:
            self._waiters += 1
            try:
                # A driver that sleeps has not seen what this thread has posted; a background thread gives way.
                if self._inbox or self._in_background:
                    self._bell.ring()
                self._changed.wait_for(
                    lambda: done() or not self._lock.locked(),
                    spin.TICK_SECONDS if remaining is None else min(remaining, spin.TICK_SECONDS),
                )
            finally:
                self._waiters -= 1

    def _listen(self, called: Callable[[], bool], hot: bool) -> None:
        """What a background thread does until it is `called`; hot: look for a while before the first sleep."""
        linger = spin.RPC_SPIN_SECONDS if hot and not self._crowded else 0.0
        if (self._inbox or linger) and not self._drive_in_background(called, linger):
            # What this thread has left to be sent when it listens again.
            self._bell.ring()
        poll = spin.SHORTEST_POLL_SECONDS
        while not (self._closing or called()):
            rest = min(spin.TICK_SECONDS, max(0.0, self._due - time.monotonic()))
            rung = self._bell.sleep_idle(min(poll, rest) if self._remote else rest)
            poll = spin.SHORTEST_POLL_SECONDS if rung else min(2 * poll, spin.LONGEST_IDLE_POLL_SECONDS)
            if rung and not hot and not called():
                # The main thread may be about to wait: it would find the lock taken and lose more than this.
                time.sleep(spin.PICK_UP_SECONDS)
            if not called() and not self._drive_in_background(called, 0.0) and rung:
                # Who drives, and perhaps only sends something, has not heard this ring.
                self._bell.ring()
        self._watch_clock_elsewhere()

    def _watch_clock_elsewhere(self) -> None:
        """Something is due so soon that a background thread which sleeps may have meant to sleep longer: wake one."""
        if self._due < time.monotonic() + spin.TICK_SECONDS and not self._closing:
            self._bell.ring_idle()

    def _drive_in_background(self, called: Callable[[], bool], linger: float) -> bool:
        """Drive until `called`, until somebody waits, or until nothing has happened for `linger` seconds.

        False when somebody else drives.
        """
        if self._closing or not self._lock.acquire(blocking=False):
            return self._closing
        until = 0.0

        def done() -> bool:
            nonlocal until
            if self._closing or self._waiters > 0 or called():
                return True
            if self._idle():
                return not linger or time.monotonic() >= until
            until = time.monotonic() + linger
            return False

        try:
            self._in_background = True
            self._enter()
            self._drive(done, None, self._spins if linger else 0)
        except BaseException as error:
            self._failure = error
            raise
        finally:
            self._in_background = False
            self._leave()
        return True

    def _summon(self) -> None:
        """Wake a background thread to run an errand; one that drives sees it without."""
        if not (self._in_background and self._driver == threading.get_ident()):
            self._bell.ring_idle()

    def _idle(self) -> bool:
        return not self._tasks and not self._inbox and self._wait is Wait.NOTIFY

    def _enter(self) -> None:
        self._driver = threading.get_ident()
        self._bell.enter()
        self._wait = Wait.AGAIN

    def _leave(self) -> None:
        """Give the drive lock back; whoever still has something to wait for is woken to take it."""
        again = True
        try:
            again = self._bell.leave()
            if again and not (self._waiters or self._inbox or self._tasks):
                # Most likely a peer's notify_if_sleeping for what has ended since: a look is cheaper than waking
                # the thread for it.
                self._bell.enter()
                self._advance(True)
                again = self._bell.leave()
            again = again or self._is_half_done()
        finally:
            self._driver = 0
            self._lock.release()
        if self._waiters:
            self._unheard = again
            with self._changed:
                self._changed.notify_all()
        elif again or self._inbox or self._tasks:
            self._bell.ring()

    def _is_half_done(self) -> bool:
        """True while bytes are on their way, which MPI may move only while somebody looks."""
        return any(is_half_done() for is_half_done in self._half_done)

    def _drive(self, done: Callable[[], bool], deadline: float | None, spins: int) -> None:
        look: SpinPolicy | None = None
        poll = spin.SHORTEST_POLL_SECONDS
        rung = True
        self._unheard = False
        # A background thread that is called away looks first at what it was rung for: nobody else has heard it.
        while not done() or (rung and self._in_background):
            self._wait = self._advance(rung)
            rung = False
            if self._wait is Wait.AGAIN:
                look, poll = None, spin.SHORTEST_POLL_SECONDS
                continue
            now = time.monotonic()
            look = look or self._new_look(now, spins)
            overdue = deadline is not None and now >= deadline
            if not overdue and look.goes_on(now, self._polls_busily):
                if self._crowded or look.count > spins or self.thread_pool.limit:
                    # The rank that is waited for may need this core: the system wakes it where the ring came from.
                    os.sched_yield()
                rung = self._bell.rung_politely() if self._in_background else self._bell.rung()
                continue
            if overdue:
                return
            rung = self._sleep(done, deadline, poll)
            poll = min(2 * poll, spin.LONGEST_POLL_SECONDS)

    def _new_look(self, now: float, spins: int) -> SpinPolicy:
        busily = self._polls_busily and (spins > 0 or self._is_half_done())
        return new_spin_policy(now, spins, serves=self.thread_pool.limit > 0, crowded=self._crowded, busily=busily)

    @property
    def _polls_busily(self) -> bool:
        """Whether a waiter looks on for a while because nobody rings for what it waits for."""
        return not self._crowded and (self._remote or self._wait is Wait.POLL)

    def _sleep(self, done: Callable[[], bool], deadline: float | None, poll: float) -> bool:
        """Look once more, then sleep until rung, until the next poll or until the next health check."""
        self._bell.prepare_sleep()
        try:
            self._wait = self._advance(self._bell.rung())
            if self._wait is Wait.AGAIN:
                return True
            if done():
                return False
            seconds = poll if self._wait is Wait.POLL or self._remote else spin.TICK_SECONDS
            until = self._due if deadline is None else min(deadline, self._due)
            seconds = min(seconds, max(0.0, until - time.monotonic()))
            rung = self._bell.sleep(seconds)
        finally:
            self._bell.awake()
        return rung or self._remote

    def _advance(self, rung: bool) -> Wait:
        """One turn over everything; what the whole of it waits for."""
        wait = Wait.NOTIFY
        while self._inbox:
            self._inbox.popleft()()
            wait = Wait.AGAIN
        for source in self._sources:
            wait = max(wait, source(rung))
        for task in list(self._tasks):
            wait = max(wait, self._step(task))
        if self._next_tick <= (now := time.monotonic()):
            self._next_tick = now + spin.TICK_SECONDS
            self._tick()
        if self._due <= now:
            self._due = math.inf
            self.due_at(self._on_due(now))
            wait = Wait.AGAIN
        if self._waiters and wait is Wait.AGAIN:
            # A message alone can end a wait (a barrier, an error, a time limit), without any task.
            with self._changed:
                self._changed.notify_all()
        return wait

    def _step(self, task: Task[Any]) -> Wait:
        if task.done:
            return Wait.AGAIN
        try:
            return task.routine.send(None)
        except StopIteration as stop:
            self._end(task, stop.value, None)
        except Exception as error:
            self._end(task, None, error)
        except BaseException as error:
            self._end(task, None, error)
            raise
        return Wait.AGAIN

    def _end(self, task: Task[Any], result: Any, error: BaseException | None) -> None:
        if task in self._tasks:
            self._tasks.remove(task)
        task.finish(result, error)
        with self._changed:
            if self._waiters:
                self._changed.notify_all()


def _nothing_due(now: float) -> float:
    return math.inf
