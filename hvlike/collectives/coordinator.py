"""The coordinator of a process set: the first rank collects what all members ask for and announces an order.

Lives in the loop of that rank. It also sees what nobody else can: deadlocks, stalls, and who is missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from hvlike.collectives.agreement import Agreement, Verdict, name_ranks
from hvlike.collectives.inspection import Answer, Inspection
from hvlike.collectives.joining import JOIN_KEY, LEAVE_KEY
from hvlike.collectives.request import Key, Signature
from hvlike.collectives.trace import Trace
from hvlike.collectives.waits import Counts, Waiting, WaitTable
from hvlike.errors import DeadlockError, HorovodInternalError

NEVER_NUMBERED = ("plan", "lane", "join", "process_set")
"""Kinds whose signatures hardly come twice."""

Announcement = tuple[list[tuple[Verdict, int | None]], Counts]


class Coordinator:
    """What the ranks of one process set have asked for, as their first rank sees it."""

    def __init__(
        self,
        ranks: tuple[int, ...],
        announce: Callable[[Announcement], None],
        inspection: Inspection,
        capacity: int,
        trace: Trace,
    ) -> None:
        """announce: tells every member, this rank included; capacity: how many signatures get a number."""
        self.agreement = Agreement(ranks)
        self.waits = WaitTable(ranks)
        self.inspection = inspection
        self._ranks = ranks
        self._tell = announce
        self._capacity = capacity
        self._trace = trace
        self._signatures: dict[int, Signature] = {}
        self._numbers: dict[Signature, int] = {}
        self._gone: dict[int, HorovodInternalError] = {}
        self._failure: HorovodInternalError | None = None
        """Why nothing runs until all ranks have left a Join context."""

    def collect(self, position: int, entries: list[tuple[str, Signature | int]]) -> None:
        """The member at `position` asks for these, in this order."""
        verdicts = []
        now = time.monotonic()
        for name, entry in entries:
            signature = self._signatures[entry] if isinstance(entry, int) else entry
            key = (signature.kind, name)
            if self._trace.recorder.on:
                self._trace.ready(self._ranks[position], key)
            if self._failure is not None and key != LEAVE_KEY:
                verdicts.append(self._fail(key, self._failure))
                continue
            if key == JOIN_KEY:
                verdicts += self.agreement.join(position, signature)
                self._doom(verdicts, key)
                continue
            verdict = self.agreement.submit(position, key, signature, now)
            if verdict is not None:
                verdict.last = self._ranks[position]
                verdicts.append(self._close_failure(verdict) if key == LEAVE_KEY else verdict)
            else:
                self._doom(verdicts, key)
        self._announce(verdicts)
        if self.agreement.away:
            # The others may have been waiting for a while: with one rank less they can be stuck for good.
            self._check_deadlock()

    def fail_all(self, failure: HorovodInternalError) -> None:
        """A member has left a Join context by an exception: nothing runs until all members have left it."""
        self._failure = failure
        self._announce([self._fail(key, failure) for key in list(self.agreement.pending) if key != LEAVE_KEY])

    @property
    def failing(self) -> bool:
        """True from such an exception until all have left."""
        return self._failure is not None

    def _close_failure(self, verdict: Verdict) -> Verdict:
        """All have left: they go on from here."""
        failure, self._failure = self._failure, None
        end = replace(verdict.extra, failed=verdict.extra.failed or failure is not None, error=failure)
        return replace(verdict, extra=end)

    def _doom(self, verdicts: list[Verdict], key: Key) -> None:
        if self._gone:
            verdicts += self._doomed([key])

    def waiting(self, position: int, waiting: Waiting) -> None:
        """The member at `position` has begun to wait."""
        self.waits.report(position, replace(waiting, since=time.monotonic()))
        self._check_deadlock()

    def resumed(self, position: int) -> None:
        """The member at `position` no longer waits."""
        self.waits.resume(position)

    def answered(self, position: int, answer: Answer) -> None:
        """The member at `position` has said what it is at."""
        self.inspection.hear(position, answer)

    def watch(self) -> HorovodInternalError | None:
        """Look for stalls, about four times a second; returns the error that shall end everything, if any."""
        return self.inspection.watch(self.agreement, self.waits)

    def lose(self, errors: dict[int, HorovodInternalError]) -> None:
        """Some members have left: nothing that needs them can run any more."""
        self._gone.update({rank: error for rank, error in errors.items() if rank in self._ranks})
        if self._gone:
            self._announce(self._doomed(list(self.agreement.pending)))

    def _doomed(self, keys: Iterable[Key]) -> list[Verdict]:
        verdicts = []
        for key in keys:
            gone = [rank for rank in self.agreement.missing(key) if rank in self._gone]
            if gone:
                error = self._gone[gone[0]]
                told = type(error)(
                    f"{key[0]} {key[1]!r} cannot be completed: {name_ranks(gone)} will not take part. {error}"
                )
                verdicts.append(self._fail(key, told))
        return verdicts

    def _fail(self, key: Key, error: HorovodInternalError) -> Verdict:
        self.agreement.withdraw(key)
        if key == LEAVE_KEY:
            self._failure = None
        return Verdict(key, Signature(key[0]), error=error, uniform=False)

    def _announce(self, verdicts: list[Verdict], counts: Counts | None = None) -> None:
        if not verdicts:
            return
        for verdict in verdicts:
            self.waits.ended(verdict.key)
            if verdict.key in (JOIN_KEY, LEAVE_KEY) and verdict.error is None:
                counts = verdict.extra.counts
        self._trace.cycle()
        self._tell(([(verdict, self._number(verdict)) for verdict in verdicts], counts or {}))

    def _number(self, verdict: Verdict) -> int | None:
        """The number by which all members call this signature from now on, when it is a new one."""
        signature = verdict.signature
        if (
            not verdict.uniform
            or signature.kind in NEVER_NUMBERED
            or signature in self._numbers
            or len(self._signatures) >= self._capacity
        ):
            return None
        number = len(self._signatures)
        self._signatures[number] = signature
        self._numbers[signature] = number
        return number

    def _check_deadlock(self) -> None:
        if not self.waits.deadlocked(self._missing, self.agreement.joined, self.agreement.away):
            return
        error = DeadlockError(f"no rank can go on: {self.waits.describe()}. {self.waits.advice()}")
        counts = self.waits.aligned_counts()
        keys = [key for key in self.waits.waited_for() if key != JOIN_KEY]
        self._announce([self._fail(key, error) for key in keys], counts)

    def _missing(self, key: Key) -> list[int]:
        """Who has not asked for a request yet; nobody if it has been decided and only takes its time."""
        return self.agreement.missing(key) if key in self.agreement.pending else []
