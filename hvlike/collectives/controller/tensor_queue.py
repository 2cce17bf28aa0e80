"""What this rank has asked for in one process set: in flight, how many, and which last; and names for unnamed calls.

Negotiated and inline operations are numbered in one order here, by any thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping, MutableSequence, Sequence
from typing import Protocol

import torch

from hvlike.collectives.requests.request import CallSite, Request, RequestKey
from hvlike.errors import DuplicateNameError, HorovodInternalError
from hvlike.observe.log import frame_of
from hvlike.system.system import system


class Watcher(Protocol):
    """Who is told of the operations that this rank numbers: a peer on the node, or the agreement with other nodes."""

    @property
    def asleep(self) -> Sequence[int]:
        """One word; other than 0: it must be told."""

    def notify_if_sleeping(self) -> None: ...


class AutomaticNames:
    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._lock = system.Lock()

    def next(self, kind: str) -> str:
        """A name for the next unnamed operation of this kind; the same on ranks that issue the same operations."""
        return automatic_name(self.draw(kind))

    def draw(self, kind: str) -> int:
        with self._lock:
            number = self._counts.get(kind, 0)
            self._counts[kind] = number + 1
        return number

    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    def align(self, counts: Mapping[str, int]) -> None:
        with self._lock:
            self._counts.update(counts)


def automatic_name(number: int) -> str:
    return f"noname.{number}"


MANY_THREADS = 64  # Beyond this many the table of threads is cleared of those that have ended
_EPOCH_BITS = 32


class TensorQueue:
    __slots__ = (
        "_in_backward",
        "_rank",
        "_threads",
        "board",
        "closed",
        "entered",
        "here",
        "last",
        "lock",
        "outbox",
        "requests",
    )

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.lock = system.Lock()
        self.entered = 0  # Things asked for: the same on all ranks where each asks for the same in one order
        # Where other ranks look at that number: a word for it, and the bells of those that may sleep over it.
        self.board: tuple[MutableSequence[int] | memoryview, Sequence[Watcher]] | None = None
        self.requests: dict[RequestKey, Request] = {}  # What goes through the coordinator and was not announced yet
        self.outbox: deque[Request] = deque()  # Those of them that the coordinator is still to be told of
        self.closed: HorovodInternalError | None = None
        self.last: tuple[RequestKey, CallSite | str, float] | None = None  # Asked for last, where and when
        self.here = _Here()
        self._threads: set[threading.Thread] = set()
        self._in_backward: set[int] = set()  # Numbers of autograd's threads, which live as long as the process

    def enter(self, request: Request, *, counted: bool) -> None:
        """A request begins; counted: an inline attempt has numbered it before. Raises: DuplicateNameError, `closed`."""
        key = request.key
        with self.lock:
            if self.closed is not None:
                raise self.closed
            if key in self.requests:
                raise DuplicateNameError(
                    f"Requested to {key[0]} a tensor with the same name as another tensor that is currently being "
                    f"processed: {key[1]!r} on rank {self._rank}. Synchronize the first one before, or use a "
                    "different tensor name."
                )
            self.requests[key] = request
            if not counted:
                self.entered += 1
                if self.board is not None:
                    word, bells = self.board
                    # What this rank has passed before it has come to it stays passed.
                    word[0] = max(word[0], self.entered)
                    for bell in bells:
                        if bell.asleep[0]:
                            bell.notify_if_sleeping()
        self.last = (key, request.place, request.time)
        if not self.here.is_known:
            self.know_thread()

    def leave(self, key: RequestKey) -> Request | None:
        """A request has been announced; None where this rank has not asked for it."""
        with self.lock:
            return self.requests.pop(key, None)

    def may_begin(self, key: RequestKey) -> bool:
        """Whether an operation could be entered now; with the lock held."""
        return self.closed is None and key not in self.requests

    def notice(self, key: RequestKey, place: CallSite) -> None:
        """An operation begins that goes without the coordinator: reports and the search for deadlocks know of it."""
        self.know_thread()
        self.last = (key, place, system.monotonic())

    @property
    def next_epoch(self) -> int:
        """The first number of the next epoch."""
        return ((self.entered >> _EPOCH_BITS) + 1) << _EPOCH_BITS

    def begin_epoch(self, decided: Iterable[RequestKey] = ()) -> None:
        """All go on from here alike: what this rank alone has asked for counts on, `decided` no longer does."""
        with self.lock:
            in_flight = len(self.requests.keys() - set(decided))
            self.entered = self.next_epoch + in_flight

    def recount(self, index: int) -> None:
        """An attempt that was number `index` is to be negotiated: number it again if an epoch has begun meanwhile."""
        with self.lock:
            if self.entered >> _EPOCH_BITS != index >> _EPOCH_BITS:
                self.entered += 1

    def close(self, error: HorovodInternalError) -> list[Request]:
        """Accept nothing more, for the first reason given; returns what was in flight."""
        with self.lock:
            self.closed = self.closed or error
            requests = list(self.requests.values())
            self.requests.clear()
        return requests

    def know_thread(self) -> None:
        if self.here.is_known:
            return
        self.here.is_known = True
        if calling_thread() is None:
            self._in_backward.add(threading.get_ident())
            return
        self._threads.add(threading.current_thread())
        if len(self._threads) > MANY_THREADS:
            self.has_one_thread()

    def has_one_thread(self) -> bool:
        """Whether no other thread than this one can ask for anything: none that has, and none that may yet.

        A daemon (the writer of a log, a loader of data) counts only once it has asked for something.
        """
        for thread in tuple(self._threads):
            if not thread.is_alive():
                self._threads.discard(thread)
        others = {*self._threads, *system.lasting_threads()} - {threading.current_thread()}
        # With several GPUs another thread of autograd may ask for something in the same pass.
        if calling_thread() is None and len(self._in_backward) == 1:
            callers = [each for each in others if _waits_for_backward(each)]
            if len(callers) == 1:
                # It has called the pass in which this thread asks, and does nothing until that has ended.
                others.difference_update(callers)
        return not others


def calling_thread() -> threading.Thread | None:
    """The thread of the program that calls; None: the program called backward(), and a thread of autograd runs a part
    of that. Autograd has one thread for each GPU; on the CPU it uses the caller's.
    """
    thread = threading.current_thread()
    started_by_python = not isinstance(thread, threading._DummyThread)
    return thread if started_by_python or torch._C._current_graph_task_id() == -1 else None


def _waits_for_backward(thread: threading.Thread) -> bool:
    frame = frame_of(thread)
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"


class _Here(threading.local):
    """Of the calling thread. Numbers of threads serve more than one of them, and objects take longer to find."""

    is_known = False
