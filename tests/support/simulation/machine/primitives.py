"""Threads, locks and semaphores of simulated jobs, with the interfaces of `threading` as far as hvlike uses them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from support.simulation.machine.scheduler import Scheduler
from support.simulation.machine.simulated_thread import SimulatedThread

BETWEEN = 0.05  # How often others go on just after a look


def _limit(scheduler: Scheduler, seconds: float | None) -> float | None:
    return None if seconds is None or seconds < 0 else scheduler.now + seconds


class SimulatedLock:
    """threading.Lock."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._held = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take it."""
        self._scheduler.fence()
        self._scheduler.switch("lock")
        if self._held and blocking:
            self._scheduler.block(self._is_free, _limit(self._scheduler, timeout), "waits for a lock", self)
        if self._held:
            return False
        self._held = True
        self._scheduler.acquire()
        return True

    def release(self) -> None:
        """Give it back."""
        assert self._held, "a lock was released that nobody holds"
        self._held = False
        self._scheduler.fence()
        self._scheduler.touch(self)
        self._scheduler.switch("unlock")

    def locked(self) -> bool:
        """Whether somebody holds it."""
        return self._held

    def _is_free(self) -> bool:
        return not self._held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SimulatedRLock(SimulatedLock):
    """threading.RLock."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self._owner: SimulatedThread | None = None
        self._times = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take it, or take it once more."""
        if self._times and self._owner is self._scheduler.current:
            self._times += 1
            return True
        if not super().acquire(blocking, timeout):
            return False
        self._owner, self._times = self._scheduler.current, 1
        return True

    def release(self) -> None:
        """Give it back once."""
        self._times -= 1
        if not self._times:
            self._owner = None
            super().release()


class Waiting:
    """A thread that waits to be notified."""

    told = False


class SimulatedCondition:
    """threading.Condition with a lock of its own."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._lock = SimulatedRLock(scheduler)
        self._waiting: list[Waiting] = []

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait to be notified."""
        me = Waiting()
        self._waiting.append(me)
        self._lock.release()
        try:
            self._scheduler.block(lambda: me.told, _limit(self._scheduler, timeout), "waits to be notified", me)
        finally:
            if not me.told:
                self._waiting.remove(me)
            self._lock.acquire()
        return me.told

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        """Wait until it holds."""
        until = _limit(self._scheduler, timeout)
        result = predicate()
        while not result:
            left = None if until is None else until - self._scheduler.now
            if left is not None and left <= 0:
                break
            self.wait(left)
            result = predicate()
        return result

    def notify(self, n: int = 1) -> None:
        """Wake some."""
        for each in self._waiting[:n]:
            each.told = True
            self._scheduler.change()
            self._scheduler.touch(each)
        del self._waiting[:n]

    def notify_all(self) -> None:
        """Wake all."""
        self.notify(len(self._waiting))


class SimulatedEvent:
    """threading.Event."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_set = False

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._is_set

    def set(self) -> None:
        """Set it."""
        self._scheduler.fence()
        self._is_set = True
        self._scheduler.change()
        self._scheduler.touch(self)
        self._scheduler.switch("event")

    def clear(self) -> None:
        """Set it back."""
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set."""
        return self._scheduler.block(self.is_set, _limit(self._scheduler, timeout), "waits for an event", self)


class SimulatedSemaphore:
    """hvlike.system.semaphore.Semaphore; two ranks that share memory have the same one."""

    def __init__(self, scheduler: Scheduler, *, is_fence: bool = False) -> None:
        """is_fence: only its owner posts and takes, at once."""
        self._scheduler, self._is_fence = scheduler, is_fence
        self._count = 0

    def initialise(self) -> None:
        """Nothing is to be done."""

    def post(self) -> int:
        """Add one; others may go on between what the caller has looked at and this, as after any statement."""
        self._scheduler.switch("posts")
        self._scheduler.fence()
        self._count += 1
        if not self._is_fence:
            self._scheduler.act()
            self._scheduler.change()
        self._scheduler.touch(self)
        self._scheduler.switch("post")
        return 0

    def take(self) -> int:
        """Take one, if there is one; else this is no fence, but a look alone (glibc's sem_trywait)."""
        self._scheduler.switch("take")
        if not self._count:
            if self._scheduler.random.random() < BETWEEN:
                # Others may go on before this rank's stores are seen, too, which a lock that is released shows.
                self._scheduler.hurry()
                self._scheduler.switch("took nothing")
            return -1
        self._scheduler.fence()
        self._count -= 1
        return 0

    take_politely = take

    def wait(self, seconds: float) -> bool:
        """Sleep until there is one."""
        until = self._scheduler.now + seconds
        if not self._scheduler.sleep_for(self._is_there, until, "sleeps on its doorbell", self):
            return False
        self._count -= 1
        return True

    def _is_there(self) -> bool:
        return self._count > 0


def thread_class(scheduler: Scheduler, lasting: dict[int, list[threading.Thread]]) -> type[threading.Thread]:
    """threading.Thread: what it starts belongs to the rank that starts it. lasting: gets those that are no daemons."""

    class SimulatedThreadObject(threading.Thread):
        simulated: SimulatedThread | None = None
        given_rank: int | None = None

        def __init__(self, *arguments: Any, daemon: bool = False, **options: Any) -> None:
            # What a job leaves behind when it hangs does not keep the real process.
            super().__init__(*arguments, daemon=True, **options)
            self.lasts = not daemon

        def start(self) -> None:
            rank = scheduler.rank if self.given_rank is None else self.given_rank
            self.simulated = scheduler.add(rank, self.name)
            if self.lasts:
                lasting.setdefault(rank, []).append(self)
            super().start()

        def run(self) -> None:
            assert self.simulated is not None
            scheduler.live(self.simulated, super().run)

        def is_alive(self) -> bool:
            return self.simulated is not None and not self.simulated.ended

        def join(self, timeout: float | None = None) -> None:
            what = f"waits for thread {self.name}"
            scheduler.block(lambda: not self.is_alive(), _limit(scheduler, timeout), what, self.simulated)

    return SimulatedThreadObject
