"""The coordinator of a process set: its first rank collects what all members ask for and announces an order.

It runs in that rank's loop, and also detects deadlocks, stalls and missing ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from hvlike.collectives.controller.trace import Trace
from hvlike.collectives.health.stall_inspector import StallInspector, StatusReply
from hvlike.collectives.health.wait_for_graph import Counts, WaitForGraph, WaitReport
from hvlike.collectives.requests.join_protocol import JOIN_KEY, LEAVE_KEY
from hvlike.collectives.requests.message_table import MessageTable, Response, name_ranks
from hvlike.collectives.requests.request import RequestKey, RequestSpec
from hvlike.errors import DeadlockError, HorovodInternalError

NEVER_NUMBERED = ("plan", "lane", "join", "process_set")
"""Kinds whose signatures hardly come twice."""

ResponseList = tuple[list[tuple[Response, int | None]], Counts]


class Coordinator:
    """What the ranks of one process set have asked for, as their first rank sees it."""

    def __init__(
        self,
        ranks: tuple[int, ...],
        announce: Callable[[ResponseList], None],
        inspection: StallInspector,
        capacity: int,
        trace: Trace,
    ) -> None:
        """announce: tells every member, this rank included; capacity: how many signatures get a number."""
        self.agreement = MessageTable(ranks)
        self.waits = WaitForGraph(ranks)
        self.inspection = inspection
        self._ranks = ranks
        self._tell = announce
        self._capacity = capacity
        self._trace = trace
        self._signatures: dict[int, RequestSpec] = {}
        self._numbers: dict[RequestSpec, int] = {}
        self._gone: dict[int, HorovodInternalError] = {}
        self._failure: HorovodInternalError | None = None
        """Why nothing runs until all ranks have left a Join context."""

    def collect(self, position: int, entries: list[tuple[str, RequestSpec | int]]) -> None:
        """The member at `position` asks for these, in this order."""
        responses = []
        now = time.monotonic()
        for name, entry in entries:
            signature = self._signatures[entry] if isinstance(entry, int) else entry
            key = (signature.kind, name)
            if self._trace.recorder.on:
                self._trace.ready(self._ranks[position], key)
            if self._failure is not None and key != LEAVE_KEY:
                responses.append(self._fail(key, self._failure))
                continue
            if key == JOIN_KEY:
                responses += self.agreement.join(position, signature)
                self._doom(responses, key)
                continue
            response = self.agreement.submit(position, key, signature, now)
            if response is not None:
                response.last = self._ranks[position]
                responses.append(self._close_failure(response) if key == LEAVE_KEY else response)
            else:
                self._doom(responses, key)
        self._announce(responses)
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

    def _close_failure(self, response: Response) -> Response:
        """All have left: they go on from here."""
        failure, self._failure = self._failure, None
        end = replace(response.extra, failed=response.extra.failed or failure is not None, error=failure)
        return replace(response, extra=end)

    def _doom(self, responses: list[Response], key: RequestKey) -> None:
        if self._gone:
            responses += self._doomed([key])

    def waiting(self, position: int, waiting: WaitReport) -> None:
        """The member at `position` has begun to wait."""
        self.waits.report(position, replace(waiting, since=time.monotonic()))
        self._check_deadlock()

    def resumed(self, position: int) -> None:
        """The member at `position` no longer waits."""
        self.waits.resume(position)

    def answered(self, position: int, answer: StatusReply) -> None:
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

    def _doomed(self, keys: Iterable[RequestKey]) -> list[Response]:
        responses = []
        for key in keys:
            gone = [rank for rank in self.agreement.missing(key) if rank in self._gone]
            if gone:
                error = self._gone[gone[0]]
                told = type(error)(
                    f"{key[0]} {key[1]!r} cannot be completed: {name_ranks(gone)} will not take part. {error}"
                )
                responses.append(self._fail(key, told))
        return responses

    def _fail(self, key: RequestKey, error: HorovodInternalError) -> Response:
        self.agreement.withdraw(key)
        if key == LEAVE_KEY:
            self._failure = None
        return Response(key, RequestSpec(key[0]), error=error, uniform=False)

    def _announce(self, responses: list[Response], counts: Counts | None = None) -> None:
        if not responses:
            return
        for response in responses:
            self.waits.ended(response.key)
            if response.key in (JOIN_KEY, LEAVE_KEY) and response.error is None:
                counts = response.extra.counts
        self._trace.cycle()
        self._tell(([(response, self._number(response)) for response in responses], counts or {}))

    def _number(self, response: Response) -> int | None:
        """The number by which all members call this signature from now on, when it is a new one."""
        signature = response.signature
        if (
            not response.uniform
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

    def _missing(self, key: RequestKey) -> list[int]:
        """Who has not asked for a request yet; nobody if it has been decided and only takes its time."""
        return self.agreement.missing(key) if key in self.agreement.pending else []
