"""The progress loop of a process: the only code that calls MPI after init.

The thread that waits drives. A thread that waits for a task takes the drive lock, advances every coroutine that can
advance, and sleeps on the doorbell when none can. Other waiting threads sleep until their task is done or the lock is
free. A background thread (thread_pool.py) drives only while no thread waits and something runs: an idle process sleeps.

Only the driver advances coroutines and runs what was posted; `begin` and `cancel` raise StateError elsewhere.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import Any, TypeVar

from hvlike.errors import ShutdownError, StateError
from hvlike.system.system import system
from hvlike.transport.loop.coroutine import Coroutine, Task, Wait, explain, not_the_driver
from hvlike.transport.loop.socket_events import SocketEvents
from hvlike.transport.loop.spin import (
    HELD_UP_SECONDS,
    LONGEST_IDLE_POLL_SECONDS,
    LONGEST_POLL_SECONDS,
    PICK_UP_SECONDS,
    RPC_SECONDS,
    SHORTEST_POLL_SECONDS,
    TURN_SECONDS,
    Spin,
    SpinPolicy,
)
from hvlike.transport.loop.thread_pool import ThreadPool
from hvlike.transport.memory.doorbell import ON_SEMAPHORE, ON_SOCKETS, Doorbell

T = TypeVar("T")


class Loop:
    """Advances coroutines until they end; see the head of this file for who drives."""

    def __init__(
        self, bell: Doorbell, *, spin: SpinPolicy, sockets: SocketEvents | None, tick: Callable[[], None]
    ) -> None:
        """Start the background thread, asleep. sockets: where traffic may come for which no doorbell rings. tick: the
        health check, called a few times a second, asleep or not.
        """
        self._bell, self._tick = bell, tick
        self._policy, self._spin = spin, Spin(spin)
        self._remote, self._sockets = sockets is not None, sockets
        self._inbox: deque[Callable[[], object]] = deque()
        self._sources: list[Callable[[bool], Wait]] = []
        self._unfinished: list[Callable[[], bool]] = []
        self._tasks: list[Task[Any]] = []
        self._lock = system.Lock()
        self._changed = system.Condition()
        self._waiters = self._driver = 0
        self._in_background = self._is_left_undriven = self._closing = False
        self._wait, self._next_tick = Wait.NOTIFY, 0.0
        self._due = math.inf
        self._on_due: Callable[[float], float] = lambda now: math.inf
        self._failure: BaseException | None = None
        self.thread_pool = ThreadPool(self._listen, self._summon)
        self.thread_pool.start()

    # -- from any thread ----------------------------------------------------------------------

    @property
    def drives_here(self) -> bool:
        """Whether the calling thread drives the loop: it may not wait."""
        return self._driver == get_ident()

    def add_source(self, source: Callable[[bool], Wait], is_unfinished: Callable[[], bool]) -> None:
        """Call `source(rung)` at every turn; it returns how it waits, AGAIN if it did something. is_unfinished: whether
        something has begun there for whose end no doorbell rings; a driver that leaves asks it.
        """
        self._sources.append(source)
        self._unfinished.append(is_unfinished)

    def remove_source(self, source: Callable[[bool], Wait], is_unfinished: Callable[[], bool]) -> None:
        """Undo `add_source`; in the loop, or once it was closed."""
        self._sources.remove(source)
        self._unfinished.remove(is_unfinished)

    def post(self, action: Callable[[], object], *, wake: bool = True) -> None:
        """Run `action` in the loop soon. `wake=False`: the caller is about to wait and so to drive."""
        self._inbox.append(action)
        if wake:
            self._bell.ring()

    def perform(self, action: Callable[[], object]) -> None:
        """Run `action` in the loop: at once if no thread drives, else soon. Never blocks."""
        if self.drives_here or not self._lock.acquire(blocking=False):
            self.post(action)
            return
        try:
            self._enter()
            while self._inbox:
                self._inbox.popleft()()
            action()
        finally:
            self._leave()

    def turn(self) -> None:
        """Advance what can be advanced, once, unless another thread drives already. Never blocks."""
        if not self.drives_here and self._lock.acquire(blocking=False):
            try:
                self._enter()
                # The driver before may have slept through a ring: check as if there had been one.
                self._bell.rung()
                self._advance(True)
            finally:
                self._leave()

    def advance(self, coroutine: Coroutine[Any], patience: float) -> bool:
        """Advance a coroutine in this thread until it ends; the rest of the loop gets a turn now and then. False, with
        the coroutine as far as it is: another thread drives, or nothing has moved for `patience` seconds.
        """
        if self.drives_here or not self._lock.acquire(blocking=False):
            return False
        policy = self._policy
        try:
            self._enter()
            until = last = 0.0
            turn = system.monotonic() + TURN_SECONDS
            for wait in coroutine:
                now = system.monotonic()
                if now >= turn:
                    self._advance(self._bell.rung())
                    # What the rest of the loop has done is no check that was held up.
                    last = now = system.monotonic()
                    turn = now + TURN_SECONDS
                if wait is Wait.AGAIN:
                    until = 0.0
                elif not until:
                    policy.look_again(now)
                    until = now + patience
                elif now > until:
                    return False
                else:
                    if now > last + HELD_UP_SECONDS:
                        policy.held_up(now, now - last)
                    if policy.crowded:
                        # The rank that is waited for may need this core.
                        system.yield_core()
                last = now
        finally:
            self._leave()
        return True

    def watch_clock(self, on_due: Callable[[float], float]) -> None:
        """Have `on_due(now)` called in the loop when the time given to `due_at` has come; it returns the next time."""
        self._on_due = on_due

    def start(
        self, coroutine: Coroutine[T], after: Callable[[Task[T]], None] | None = None, *, wake: bool = True
    ) -> Task[T]:
        """Advance `coroutine` until it ends; `after(task)` is then called in the loop."""
        task = Task(coroutine, after)
        if self.drives_here:
            self._tasks.append(task)
            if wake:
                self._bell.ring()
        else:
            self.post(partial(self._enlist, task), wake=wake)
        return task

    def wait(self, done: Callable[[], bool], seconds: float | None = None) -> bool:
        """Block until `done()`, driving the loop if no thread does; False when `seconds` ran out first."""
        if self.drives_here:
            raise StateError(
                "hvlike was called from inside its own progress loop (a finaliser or signal handler that ran there): "
                "only start operations from such a place, never wait for them"
            )
        deadline = None if seconds is None else system.monotonic() + seconds
        try:
            while not done():
                if self._failure is not None:
                    raise self._failure
                if deadline is not None and system.monotonic() >= deadline:
                    return False
                if self._lock.acquire(blocking=False):
                    self._drive(done, deadline, self._policy.checks)
                else:
                    self._follow(done, deadline)
        finally:
            if self._is_left_undriven:
                self._leave_undriven()
        return True

    def fail(self, error: BaseException) -> None:
        """End every wait with `error`, those to come too. In the loop."""
        self._failure = error
        self._wake_waiters()

    def close(self) -> None:
        self._closing = True
        self._bell.ring()
        self.thread_pool.close()
        with self._lock:
            while self._inbox:
                self._inbox.popleft()()
            for task in list(self._tasks):
                self._end(task, None, ShutdownError("hvlike was shut down while this was in flight"))

    # -- from inside the loop -----------------------------------------------------------------

    def due_at(self, when: float) -> None:
        if when < self._due:
            self._due = when
            self._share_due_time()

    def begin(self, coroutine: Coroutine[Any]) -> None:
        """`start` with the first step at once. From inside the loop."""
        self._check_driver("begin")
        task = Task(coroutine, None)
        self._tasks.append(task)
        self._step(task)

    def cancel(self, task: Task[Any], error: BaseException) -> None:
        if not task.done:
            self._check_driver("cancel")
            task.coroutine.close()
            self._end(task, None, error)

    def _check_driver(self, what: str) -> None:
        # Once it was closed no thread drives the loop.
        if not (self.drives_here or self._closing):
            raise not_the_driver(f"Loop.{what}()")

    def _wake_waiters(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _enlist(self, task: Task[Any]) -> None:
        # A task may have been cancelled before it began; it would look like one that always has something to do.
        if not task.done:
            self._tasks.append(task)

    # -- driving ------------------------------------------------------------------------------

    def _follow(self, done: Callable[[], bool], deadline: float | None) -> None:
        """Another thread drives: wait until the task is done or the lock may be free."""
        seconds = self._policy.tick_seconds
        if deadline is not None:
            seconds = min(seconds, max(0.0, deadline - system.monotonic()))
        with self._changed:
            self._waiters += 1
            try:
                # A driver that sleeps has not seen what this thread has posted; a background thread gives way.
                if self._inbox or self._in_background:
                    self._bell.ring()
                self._changed.wait_for(lambda: done() or not self._lock.locked(), seconds)
            finally:
                self._waiters -= 1

    def _listen(self, called: Callable[[], bool], hot: bool) -> None:
        """What a background thread does until it is `called`. hot: Check for a while before the first sleep."""
        linger = RPC_SECONDS if hot and not self._policy.crowded else 0.0
        if (self._inbox or linger) and not self._drive_in_background(called, linger):
            # What this thread has left to be sent when it listens again.
            self._bell.ring()
        poll = SHORTEST_POLL_SECONDS
        while not (self._closing or called()):
            rest = min(self._policy.tick_seconds, max(0.0, self._due - system.monotonic()))
            rung = self._bell.sleep_idle(min(poll, rest) if self._remote else rest)
            summoned = rung and self._bell.was_summoned()
            poll = SHORTEST_POLL_SECONDS if rung else min(2 * poll, LONGEST_IDLE_POLL_SECONDS)
            if rung and not hot and not called():
                # The main thread may be about to wait: it would find the lock taken and lose more than this.
                system.sleep(PICK_UP_SECONDS)
            unheard = not summoned if called() else not self._drive_in_background(called, 0.0)
            if rung and unheard:
                # By no driver: this thread runs an item, or there is one that perhaps only sends something.
                self._bell.ring()
        self._share_due_time()

    def _share_due_time(self) -> None:
        """Wake a background thread where something is due before its sleep ends."""
        if self._due < system.monotonic() + self._policy.tick_seconds and not self._closing:
            self._bell.ring_idle()

    def _drive_in_background(self, called: Callable[[], bool], linger: float) -> bool:
        """Drive until `called`, a thread waits, or `linger` seconds are idle; False when another thread drives."""
        if self._closing or not self._lock.acquire(blocking=False):
            return self._closing
        until = 0.0

        def done() -> bool:
            nonlocal until
            if self._closing or self._waiters > 0 or called() or self._failure is not None:
                return True
            if not self._tasks and not self._inbox and self._wait is Wait.NOTIFY:
                return not linger or system.monotonic() >= until
            until = system.monotonic() + linger
            return False

        try:
            self._in_background = True
            self._drive(done, None, self._policy.checks if linger else 0)
        except BaseException as error:
            self._failure = error
            raise
        return True

    def _summon(self) -> None:
        """Wake a background thread to run a work item; one that drives sees it without."""
        if not (self._in_background and self.drives_here):
            self._bell.summon()

    def _enter(self) -> None:
        """Become the driver; the drive lock was taken."""
        self._driver = get_ident()
        self._bell.enter()
        self._wait = Wait.AGAIN

    def _leave(self) -> None:
        """Give the drive lock back; a thread that still has something to wait for is woken to take it."""
        self._in_background = False
        again = True
        try:
            again = self._bell.leave()
            if again and not (self._waiters or self._inbox or self._tasks):
                # Most likely a peer's notification for what has ended since: checking costs less than a wake-up.
                self._bell.enter()
                self._advance(True)
                again = self._bell.leave()
            again = again or self._is_unfinished()
        finally:
            self._driver = 0
            self._lock.release()
        # Who waits drives next, or rings as it goes: this first, so that one of the two sees the other.
        if again or self._inbox or self._tasks:
            self._is_left_undriven = True
        if self._waiters:
            self._wake_waiters()
        elif self._is_left_undriven:
            self._leave_undriven()

    def _leave_undriven(self) -> None:
        self._is_left_undriven = False
        self._bell.ring()

    def _is_unfinished(self) -> bool:
        """True while bytes are on their way that MPI may move only while it is called."""
        return max([each() for each in self._unfinished], default=False)  # All: to ask is what advances them

    def _drive(self, done: Callable[[], bool], deadline: float | None, checks: int) -> None:
        """Drive until `done()` or the deadline; the drive lock was taken and is given back. checks: See SpinPolicy."""
        bell, spin, policy, background = self._bell, self._spin, self._policy, self._in_background
        try:
            # `_enter`, without a frame of its own.
            self._driver, self._wait, self._is_left_undriven = get_ident(), Wait.AGAIN, False
            bell.enter()
            poll, rung, spin.count = SHORTEST_POLL_SECONDS, True, 0
            # A background thread that is called away first handles what it was rung for: no other has heard it.
            while not done() or (rung and background):
                wait = self._wait = self._advance(rung)
                rung = False
                if wait is Wait.AGAIN:
                    poll, spin.count = SHORTEST_POLL_SECONDS, 0
                    continue
                if self._failure is not None:
                    return
                now = system.monotonic()
                unnotified = self._remote or wait is Wait.POLL
                serves = self.thread_pool.limit > 0
                if not spin.count:
                    lasting = unnotified and (checks > 0 or (not policy.crowded and self._is_unfinished()))
                    spin.begin(now, checks, serves=serves, unnotified=lasting)
                if deadline is not None and now >= deadline:
                    return
                if spin.goes_on(now, unnotified=unnotified):
                    if policy.crowded or serves or spin.count > checks:
                        # The awaited rank may need this core: the system wakes it where the ring came from.
                        system.yield_core()
                    rung = bell.rung_politely() if background else bell.rung()
                    continue
                rung = self._sleep(done, deadline, poll)
                spin.slept()
                poll = min(2 * poll, LONGEST_POLL_SECONDS)
        finally:
            self._leave()

    def _sleep(self, done: Callable[[], bool], deadline: float | None, poll: float) -> bool:
        """Advance once more, then sleep until rung, until the next poll or until the next health check."""
        sockets = self._sockets if self._policy.hears_sockets else None
        self._bell.prepare_sleep(ON_SEMAPHORE if sockets is None else ON_SOCKETS)
        try:
            # Who rang just as a background thread became the driver has posted for a thread that sleeps, and none does.
            self._wait = self._advance(self._bell.rung() or self._in_background)
            if self._wait is Wait.AGAIN:
                return True
            if done():
                return False
            left = max(0.0, min(self._due, math.inf if deadline is None else deadline) - system.monotonic())
            if sockets is None:
                seconds = poll if self._wait is Wait.POLL or self._remote else self._policy.tick_seconds
                return self._bell.sleep(min(seconds, left)) or self._remote
            return sockets.sleep(min(LONGEST_POLL_SECONDS, left))
        finally:
            self._bell.awake()

    def _advance(self, rung: bool) -> Wait:
        """One turn over everything; what the whole of it waits for."""
        wait = Wait.NOTIFY
        while self._inbox:
            self._inbox.popleft()()
            wait = Wait.AGAIN
        for source in self._sources:
            wait = max(wait, source(rung))
        for task in tuple(self._tasks):
            wait = max(wait, self._step(task))
        now = system.monotonic()
        if self._next_tick <= now:
            self._next_tick = now + self._policy.tick_seconds
            self._tick()
        if self._due <= now:
            self._due = math.inf
            self.due_at(self._on_due(now))
            wait = Wait.AGAIN
        if self._waiters and wait is Wait.AGAIN:
            # A message alone can end a wait (a barrier, an error, a time limit), without any task.
            self._wake_waiters()
        return wait

    def _step(self, task: Task[Any]) -> Wait:
        if task.done:
            return Wait.AGAIN
        try:
            return task.coroutine.send(None)
        except StopIteration as stop:
            self._end(task, stop.value, None)
        except Exception as error:
            self._end(task, None, explain(error, task.coroutine))
        except BaseException as error:
            self._end(task, None, error)
            raise
        return Wait.AGAIN

    def _end(self, task: Task[Any], result: Any, error: BaseException | None) -> None:
        if task in self._tasks:
            self._tasks.remove(task)
        task.result, task.error = result, error
        task.done = True
        if task.after is not None:
            task.after(task)
        if self._waiters:
            self._wake_waiters()
