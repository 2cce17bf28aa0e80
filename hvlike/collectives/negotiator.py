"""Negotiation: named requests come in any order on each rank; the coordinator announces an order for all.

Every rank tells the first rank of the process set what it asks for. When all members have asked,
the coordinator compares and announces: the verdicts of one message are run in its order everywhere.
A signature that was announced once is referred to by its number from then on.

Each Negotiator lives in the loop, but for `submit` and `wait`, which any thread may call.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from hvlike.collectives.agreement import Agreement, Verdict, name_ranks
from hvlike.collectives.names import AutomaticNames
from hvlike.collectives.request import Key, Request, Signature
from hvlike.collectives.waits import Counts, Waiting, WaitTable
from hvlike.errors import DeadlockError, DuplicateNameError, HorovodInternalError
from hvlike.transport import forks
from hvlike.transport.fabric import Fabric
from hvlike.transport.group import Group

logger = logging.getLogger("hvlike")

PATIENCE_SECONDS = 0.5
"""How long a rank waits before it says so; only then can a deadlock be found."""

SIGNATURES_REMEMBERED = 4096

READY, VERDICTS, WAITING, RESUMED = "ready", "verdicts", "waiting", "resumed"

Send = Callable[[int, str, Any], None]
Runner = Callable[[list[tuple[Request, Verdict]]], None]


class Negotiator:
    """The requests of this rank in one process set and, on its first rank, those of all."""

    def __init__(self, fabric: Fabric, group: Group, run: Runner, send: Send, stall_seconds: float) -> None:
        """run: carries out what was agreed; send: takes a message to a rank; stall_seconds: when to complain."""
        self.names = AutomaticNames()
        self.steps: dict[str, int] = {}
        """Steps of each planned reduction that this rank has entered."""
        self._fabric = fabric
        self._group = group
        self._run = run
        self._send = send
        self._coordinator = group.ranks[0]
        self._requests: dict[Key, Request] = {}
        self._lock = threading.Lock()
        self._outbox: deque[Request] = deque()
        self._numbers: dict[Signature, int] = {}
        self._signatures: dict[int, Signature] = {}
        self._agreement = Agreement(group.ranks)
        self._waits = WaitTable(group.ranks)
        self._positions = {rank: position for position, rank in enumerate(group.ranks)}
        self._gone: dict[int, HorovodInternalError] = {}
        self._closed: HorovodInternalError | None = None
        self._threads: set[int] = set()
        self._stall_seconds = stall_seconds
        self._next_report = 0.0
        self._stoppable: dict[Key, Callable[[HorovodInternalError], None]] = {}

    # -- any thread -----------------------------------------------------------------------------

    def submit(self, request: Request, *, wake: bool) -> None:
        """Ask for an operation; `wake=False` when the caller will wait for it at once.

        Raises: DuplicateNameError, ShutdownError.
        """
        key = request.key
        with self._lock:
            if self._closed is not None:
                raise self._closed
            if key in self._requests:
                raise DuplicateNameError(
                    f"Requested to {key[0]} a tensor with the same name as another tensor that is currently being "
                    f"processed: {key[1]!r} on rank {self._fabric.world.rank}. Synchronize the first one before, or "
                    "use a different tensor name."
                )
            self._requests[key] = request
        self._threads.add(threading.get_ident())
        request.handle.attach(lambda done, timeout: self.wait(key, done, timeout))
        self._outbox.append(request)
        self._fabric.loop.post(self._flush, wake=wake)

    def wait(self, key: Key, done: Callable[[], bool], timeout: float | None) -> bool:
        """Wait for the operation `key`; tells the coordinator when that takes long. Without time: one turn of work.

        Raises: ForkedProcessError in a child that has inherited the handle.
        """
        forks.check()
        loop = self._fabric.loop
        if timeout is not None and timeout <= 0:
            loop.turn()
            return done()
        patience = PATIENCE_SECONDS if timeout is None else min(timeout, PATIENCE_SECONDS)
        if loop.wait(done, patience):
            return True
        if timeout is not None and timeout <= patience:
            return False
        # With several threads another one may still ask for what the peers lack.
        certain = len(self._threads) <= 1
        waiting = Waiting(key, self.names.counts(), dict(self.steps), certain)
        loop.post(lambda: self._report(WAITING, waiting), wake=False)
        try:
            return loop.wait(done, None if timeout is None else timeout - patience)
        finally:
            loop.post(lambda: self._report(RESUMED, None), wake=False)

    # -- in the loop: as a member ---------------------------------------------------------------

    def stoppable(self, key: Key, stop: Callable[[HorovodInternalError], None] | None) -> None:
        """Say how to end a wait for something that is not a request of this negotiator; None: it has ended."""
        if stop is None:
            self._stoppable.pop(key, None)
        else:
            self._stoppable[key] = stop

    def _flush(self) -> None:
        entries = []
        while self._outbox:
            request = self._outbox.popleft()
            number = self._numbers.get(request.signature)
            entries.append((request.name, request.signature if number is None else number))
        if entries:
            self._report(READY, entries)

    def _report(self, what: str, value: Any) -> None:
        """Tell the coordinator, which may be this rank."""
        if self._group.rank == 0:
            self.hear(self._fabric.world.rank, what, value)
        else:
            self._send(self._coordinator, what, value)

    def hear(self, rank: int, what: str, value: Any) -> None:
        """A message of a member of this group."""
        position = self._positions[rank]
        if what == READY:
            self._collect(position, value)
        elif what == VERDICTS:
            self._obey(*value)
        elif what == WAITING:
            self._waits.report(position, replace(value, since=time.monotonic()))
            self._check_deadlock()
        elif what == RESUMED:
            self._waits.resume(position)

    def _obey(self, verdicts: list[tuple[Verdict, int | None]], counts: Counts) -> None:
        self.names.align(counts)
        agreed = []
        for verdict, number in verdicts:
            with self._lock:
                request = self._requests.pop(verdict.key, None)
            if number is not None:
                self._numbers[verdict.signature] = number
            if request is None:
                stop = self._stoppable.pop(verdict.key, None)
                if stop is not None and verdict.error is not None:
                    stop(verdict.error)
            elif verdict.error is not None:
                request.handle.complete(None, verdict.error)
            else:
                agreed.append((request, verdict))
        if agreed:
            self._run(agreed)

    def close(self, error: HorovodInternalError) -> None:
        """Refuse what comes and fail what is there."""
        with self._lock:
            self._closed = error
            requests = list(self._requests.values())
            self._requests.clear()
        for request in requests:
            request.handle.complete(None, error)
        for stop in list(self._stoppable.values()):
            stop(error)
        self._stoppable.clear()

    # -- in the loop: as the coordinator --------------------------------------------------------

    def lose(self, errors: dict[int, HorovodInternalError]) -> None:
        """Some members have left: nothing that needs them can run any more. On every rank of the group."""
        self._gone.update({rank: error for rank, error in errors.items() if rank in self._group.ranks})
        if self._group.rank == 0 and self._gone:
            self._announce(self._doomed(list(self._agreement.pending)))

    def _doomed(self, keys: Iterable[Key]) -> list[Verdict]:
        verdicts = []
        for key in keys:
            gone = [rank for rank in self._agreement.missing(key) if rank in self._gone]
            if gone:
                error = self._gone[gone[0]]
                told = type(error)(
                    f"{key[0]} {key[1]!r} cannot be completed: {name_ranks(gone)} will not take part. {error}"
                )
                verdicts.append(self._fail(key, told))
        return verdicts

    def _fail(self, key: Key, error: HorovodInternalError) -> Verdict:
        self._agreement.withdraw(key)
        return Verdict(key, Signature(key[0]), error=error, uniform=False)

    def _collect(self, position: int, entries: list[tuple[str, Signature | int]]) -> None:
        verdicts = []
        for name, entry in entries:
            signature = self._signatures[entry] if isinstance(entry, int) else entry
            key = (signature.kind, name)
            verdict = self._agreement.submit(position, key, signature)
            if verdict is not None:
                verdicts.append(verdict)
            elif self._gone:
                verdicts += self._doomed([key])
        self._announce(verdicts)

    def _announce(self, verdicts: list[Verdict], counts: Counts | None = None) -> None:
        if not verdicts:
            return
        for verdict in verdicts:
            self._waits.ended(verdict.key)
        value = ([(verdict, self._number(verdict)) for verdict in verdicts], counts or {})
        for rank in self._group.ranks[1:]:
            self._send(rank, VERDICTS, value)
        self._obey(*value)

    def _number(self, verdict: Verdict) -> int | None:
        """The number by which all members call this signature from now on, when it is a new one."""
        known = verdict.signature in self._numbers
        if (
            known
            or not verdict.uniform
            or verdict.signature.kind == "plan"
            or len(self._signatures) >= SIGNATURES_REMEMBERED
        ):
            return None
        number = len(self._signatures)
        self._signatures[number] = verdict.signature
        self._numbers[verdict.signature] = number
        return number

    def _check_deadlock(self) -> None:
        if not self._waits.deadlocked(self._missing):
            return
        error = DeadlockError(
            f"no rank can go on: {self._waits.describe()}. Every rank has to call the same operations under the same "
            "names; look for a collective that only some ranks reach (inside `if rank == 0:`, say) or for names that "
            "differ."
        )
        counts = self._waits.aligned_counts()
        self._announce([self._fail(key, error) for key in self._waits.waited_for()], counts)

    def _missing(self, key: Key) -> list[int]:
        """Who has not asked for a request yet; nobody if it has been decided and only takes its time."""
        return self._agreement.missing(key) if key in self._agreement.pending else []

    def watch(self) -> None:
        """Report, on the coordinator, who has waited long and for whom; called about four times a second."""
        oldest = self._waits.oldest()
        now = time.monotonic()
        if oldest is None or now - oldest < self._stall_seconds or now < self._next_report:
            return
        self._next_report = now + self._stall_seconds
        logger.warning(
            "stalled for %.0f s: %s; not waiting with them: %s. Every rank has to call the same operations.",
            now - oldest,
            self._waits.describe(),
            name_ranks(self._waits.absent()) if self._waits.absent() else "nobody",
        )
