"""The coordinator of a process set: its first rank collects what all members ask for and announces an order.

It runs in that rank's loop, and also detects deadlocks, stalls and missing ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from hvlike.collectives.controller.trace import Trace
from hvlike.collectives.health.departures import Errors
from hvlike.collectives.health.stall_inspector import StallInspector
from hvlike.collectives.health.wait_for_graph import Counts, WaitForGraph, WaitReport
from hvlike.collectives.requests.join_protocol import JOIN_KEY, LEAVE_KEY
from hvlike.collectives.requests.message_table import MessageTable, ReadyList, Response, name_ranks
from hvlike.collectives.requests.request import RequestKey, RequestSpec
from hvlike.errors import DeadlockError, HorovodInternalError
from hvlike.system.system import system

NEVER_NUMBERED = ("plan", "queue", "join", "process_set")  # Kinds whose specs hardly come twice
KnownResponse = tuple[str, int, int]  # Name, number of a spec that was announced before, the rank that asked last
ResponseList = tuple[list[Response | KnownResponse], Counts]  # In the order in which all ranks run them


class Coordinator:
    def __init__(
        self,
        ranks: tuple[int, ...],
        announce: Callable[[ResponseList], None],
        inspection: StallInspector,
        capacity: int,
        trace: Trace,
    ) -> None:
        """announce: tells every member, this rank included; capacity: how many specs get a number."""
        self.table = MessageTable(ranks)
        self.waits = WaitForGraph(ranks)
        self.inspection = inspection
        self._ranks = ranks
        self._tell = announce
        self._capacity = capacity
        self._trace = trace
        self._specs: list[RequestSpec] = []
        self._numbers: dict[RequestSpec, int] = {}
        self._gone: dict[int, HorovodInternalError] = {}
        self.failure: HorovodInternalError | None = None  # Why nothing runs until all ranks have left a Join context

    def collect(self, ready: ReadyList) -> None:
        """Members ask for these, each in this order."""
        table, size, now = self.table, len(self._ranks), system.monotonic()
        pending, since = table.pending, table.since
        announced: list[Response | KnownResponse] = []
        for positions, entries in ready:
            exceptional = self.failure or self._gone or table.joins.requests or self._trace.recorder.on
            for name, entry in entries:
                if exceptional or type(entry) is not int:
                    spec = self._specs[entry] if isinstance(entry, int) else entry
                    for position in positions:
                        announced += self._collect_one(position, (spec.kind, name), spec, now)
                    continue
                spec = self._specs[entry]
                key = (spec.kind, name)
                asked = pending.get(key)
                if asked is None:
                    asked = pending[key] = {}
                    since[key] = now
                for position in positions:
                    asked[position] = spec
                if len(asked) < size:
                    continue
                for other in asked.values():
                    if other is not spec:
                        # The same in other words, or a mismatch.
                        announced += self._collect_one(position, key, spec, now)
                        break
                else:
                    del pending[key], since[key]
                    if self.waits.waits:
                        self.waits.ended(key)
                    announced.append((name, entry, self._ranks[position]))
        if announced:
            self._announce(announced)
        if table.joins.requests:
            # The others may have been waiting for a while: with one rank less they can be stuck for good.
            self._check_deadlock()

    def _collect_one(self, position: int, key: RequestKey, spec: RequestSpec, now: float) -> list[Response]:
        if self._trace.recorder.on:
            self._trace.ready(self._ranks[position], key)
        if self.failure is not None and key != LEAVE_KEY:
            return [self._fail(key, self.failure)]
        if key == JOIN_KEY:
            return [*self.table.join(position, spec), *self._doomed([key] if self._gone else ())]
        response = self.table.submit(position, key, spec, now)
        if response is None:
            return self._doomed([key] if self._gone else ())
        response.last = self._ranks[position]
        return [self._close_failure(response) if key == LEAVE_KEY else response]

    def fail_all(self, failure: HorovodInternalError) -> None:
        """A member has left a Join context with an exception: nothing runs until all members have left it."""
        self.failure = failure
        self._announce([self._fail(key, failure) for key in list(self.table.pending) if key != LEAVE_KEY])

    def _close_failure(self, response: Response) -> Response:
        """All have left: they go on from here."""
        failure, self.failure = self.failure, None
        end = replace(response.extra, failed=response.extra.failed or failure is not None, error=failure)
        return replace(response, extra=end)

    def waiting(self, position: int, waiting: WaitReport) -> None:
        self.waits.report(position, replace(waiting, since=system.monotonic()))
        self._check_deadlock()

    def lose(self, errors: Errors) -> None:
        """Some members have left: nothing that needs them can run any more."""
        self._gone.update({rank: error for rank, error in errors.items() if rank in self._ranks})
        if self._gone:
            self._announce(self._doomed(list(self.table.pending)))

    def _doomed(self, keys: Iterable[RequestKey]) -> list[Response]:
        responses = []
        for key in keys:
            gone = [rank for rank in self.table.missing(key) if rank in self._gone]
            if gone:
                error = self._gone[gone[0]]
                told = type(error)(
                    f"{key[0]} {key[1]!r} cannot be completed: {name_ranks(gone)} will not take part. {error}"
                )
                responses.append(self._fail(key, told))
        return responses

    def _fail(self, key: RequestKey, error: HorovodInternalError) -> Response:
        self.table.withdraw(key)
        if key == LEAVE_KEY:
            self.failure = None
        return Response(key, RequestSpec(key[0]), error=error, uniform=False)

    def _announce(self, responses: Sequence[Response | KnownResponse], counts: Counts | None = None) -> None:
        if not responses:
            return
        for response in responses:
            if isinstance(response, Response):
                self.waits.ended(response.key)
                if response.key in (JOIN_KEY, LEAVE_KEY) and response.error is None:
                    counts = response.extra.counts
                self._number(response)
        if self._trace.recorder.on:
            self._trace.cycle()
        self._tell((list(responses), counts or {}))

    def _number(self, response: Response) -> None:
        spec = response.spec
        known = self._numbers.get(spec)
        if known is not None or response.error is not None or not response.uniform or spec.kind in NEVER_NUMBERED:
            return
        if len(self._specs) < self._capacity:
            response.number = self._numbers[spec] = len(self._specs)
            self._specs.append(spec)

    def _check_deadlock(self) -> None:
        if not self.waits.deadlocked(self._missing, self.table.joined, self.table.away):
            return
        error = DeadlockError(f"no rank can go on: {self.waits.describe()}. {self.waits.advice()}")
        counts = self.waits.aligned_counts()
        keys = [key for key in self.waits.waited_for() if key != JOIN_KEY]
        self._announce([self._fail(key, error) for key in keys], counts)

    def _missing(self, key: RequestKey) -> list[int]:
        """The ranks that have not asked for a request yet; none if it has been decided and is only slow."""
        return self.table.missing(key) if key in self.table.pending else []
