"""Where hvlike reaches the system: clock, threads, locks, cores, semaphores, shared memory, MPI.

Whatever decides who goes on when, or what another rank can see, is called as an attribute of `system` at the moment of
use. The attributes are those of the standard library, and calling them costs what it costs there. A simulation of whole
jobs (tests/support/simulation) replaces them all, and has every rank of a job in one process.

What belongs to a rank, and lives as long as its process, is held by objects that `of_process` has made.
"""

from __future__ import annotations

import _thread
import atexit
import os
import platform
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from hvlike.system import mapped_memory
from hvlike.system.mapped_memory import Segment, SegmentLocation, SegmentOffer
from hvlike.system.semaphore import Semaphore

T = TypeVar("T")


def _semaphore(segment: Segment, offset: int) -> Semaphore:
    return Semaphore(segment.address + offset)


def _cores() -> frozenset[int]:
    return frozenset(os.sched_getaffinity(0))


def _lasting_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if not (each.daemon or isinstance(each, threading.Timer))]


def _process_status(process: int) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


class System:
    """See the head of this file. The instance is `system`."""

    def __init__(self) -> None:
        # Times are in seconds, those of names that end in _ns in nanoseconds.
        self.monotonic: Callable[[], float] = time.monotonic
        self.monotonic_ns: Callable[[], int] = time.monotonic_ns
        self.perf_counter: Callable[[], float] = time.perf_counter
        self.time_ns: Callable[[], int] = time.time_ns
        self.sleep: Callable[[float], None] = time.sleep

        self.Thread: type[threading.Thread] = threading.Thread
        self.lasting_threads: Callable[[], list[threading.Thread]] = _lasting_threads
        """Those that the process waits for at its end, but timers."""
        self.start_thread: Callable[..., int] = _thread.start_new_thread
        self.Lock: Callable[[], threading.Lock] = threading.Lock
        self.RLock: Callable[[], threading.RLock] = threading.RLock
        self.Condition: Callable[[], threading.Condition] = threading.Condition
        self.Event: Callable[[], threading.Event] = threading.Event

        self.process: Callable[[], int] = os.getpid
        self.kill: Callable[[int, int], None] = os.kill
        self.process_status: Callable[[int], dict[str, str]] = _process_status
        """What /proc says of a process, by name; empty if it cannot be seen."""
        self.at_exit: Callable[..., Any] = atexit.register
        self.not_at_exit: Callable[[Any], None] = atexit.unregister
        self.exit_now: Callable[[int], NoReturn] = os._exit
        self.cores: Callable[[], frozenset[int]] = _cores  # That this process may use
        self.yield_core: Callable[[], None] = os.sched_yield
        self.orders_stores = platform.machine() in ("x86_64", "AMD64", "i686")
        """Stores become visible in order, loads keep their order, and what locks memory is a full barrier."""

        self.semaphore: Callable[[Segment, int], Semaphore] = _semaphore
        """(segment, offset): the semaphore that lies there; the memory must outlive it."""
        self.words: Callable[[Segment, int, int], memoryview] = mapped_memory.words
        """(segment, offset, count): so many words of 8 bytes from there on; an index costs some 15 ns."""
        self.private: Callable[[int], Segment] = Segment.private
        self.make_offer: Callable[[int, int], SegmentOffer | None] = mapped_memory.make_offer
        self.accept: Callable[[SegmentLocation], Segment | None] = mapped_memory.accept

        # Where a rank is no process: what stands for SocketEvents, for FirstReport and for mpi4py.MPI.
        self.socket_events: Callable[[], Any] | None = None
        self.first_report: Callable[[], Any] | None = None
        self.mpi: Callable[[], Any] | None = None


system = System()
_of_process: list[tuple[Any, Callable[[], Any]]] = []


def of_process(make: Callable[[], T]) -> T:
    """Make an object whose attributes belong to the rank, as this process is one, and register it.

    make: is called once more for each rank of a simulated job, and so makes new locks, tables and lists every time.
    """
    state = make()
    _of_process.append((state, make))
    return state


def states_of_process() -> Sequence[tuple[Any, Callable[[], Any]]]:
    """What was registered so far, and what makes such an object."""
    return _of_process
