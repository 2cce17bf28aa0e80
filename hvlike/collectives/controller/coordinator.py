"""The coordinator of a process set: its first rank collects what all members ask for and announces an order.

It runs in that rank's loop, and also detects deadlocks, stalls and missing ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from hvlike.collectives.controller.member_tree import ANSWER, FAILED, FAILURE, RESPONSES, RESUMED, WAITING
from hvlike.collectives.controller.trace import Trace
from hvlike.collectives.health.departures import Errors
from hvlike.collectives.health.stall_inspector import StallInspector
from hvlike.collectives.health.wait_for_graph import Counts, WaitForGraph
from hvlike.collectives.requests.join_protocol import JOIN_KEY, LEAVE_KEY
from hvlike.collectives.requests.message_table import Entry, MessageTable, ReadyList, Response, name_ranks
from hvlike.collectives.requests.request import RequestKey, RequestSpec
from hvlike.errors import DeadlockError, HorovodInternalError
from hvlike.system.system import system
from hvlike.transport.loop.coroutine import Coroutine, Wait, in_loop, pause
from hvlike.transport.loop.loop import Loop

NEVER_NUMBERED = ("plan", "queue", "join", "process_set")  # Kinds whose specs hardly come twice
KnownResponse = tuple[str, int, int]  # Name, number of a spec that was announced before, the rank that asked last
ResponseList = tuple[list[Response | KnownResponse], Counts]  # In the order in which all ranks run them


class ResponseCache:
    """The specs that have numbers. The coordinator gives them; the others learn them from what it announces."""

    def __init__(self, capacity: int) -> None:
        """capacity: how many specs get a number."""
        self.specs: list[RequestSpec] = []  # By number
        self.numbers: dict[RequestSpec, int] = {}
        self._extras: list[Any] = []  # `Response.extra`, which follows from the spec
        self._capacity = capacity

    def number(self, response: Response) -> None:
        """Give the spec of a response a number, if it has none and may be seen again. On the coordinator."""
        spec = response.spec
        if spec in self.numbers or response.error is not None or not response.uniform or spec.kind in NEVER_NUMBERED:
            return
        if len(self.specs) < self._capacity:
            response.number = len(self.specs)
            self._learn(response)

    def expand(self, announced: Sequence[Response | KnownResponse]) -> Sequence[Response]:
        """Return whole responses, and learn the numbers that these give."""
        responses = []
        for each in announced:
            if isinstance(each, Response):
                if each.number == len(self.specs):
                    self._learn(each)
                responses.append(each)
            else:
                name, number, last = each
                spec = self.specs[number]
                responses.append(Response((spec.kind, name), spec, self._extras[number], None, True, last, number))
        return responses

    def _learn(self, response: Response) -> None:
        self.numbers[response.spec] = len(self.specs)
        self.specs.append(response.spec)
        self._extras.append(response.extra)


class Coordinator:
    def __init__(
        self,
        ranks: tuple[int, ...],
        announce: Callable[[str, Any], None],
        loop: Loop,
        inspection: StallInspector,
        cache: ResponseCache,
        cycle_seconds: float,
        trace: Trace,
    ) -> None:
        """announce: tells every member, this rank included."""
        self._cycle_seconds = cycle_seconds  # For how long it gathers what is ready before it announces it
        self.table = MessageTable(ranks)
        self.waits = WaitForGraph(ranks)
        self.inspection = inspection
        self._ranks = ranks
        self._tell = announce
        self._loop = loop
        self._cache = cache
        self._trace = trace
        self._gathered: list[ResponseList] = []
        self._gone: dict[int, HorovodInternalError] = {}
        self.failure: HorovodInternalError | None = None  # Why nothing runs until all ranks have left a Join context

    @in_loop
    def collect(self, ready: ReadyList) -> None:
        """Members ask for these, each in this order."""
        table, now = self.table, system.monotonic()
        announced: list[Response | KnownResponse] = []
        for positions, entries in ready:
            if self.failure or self._gone or table.joins.requests or self._trace.recorder.on:
                for name, entry in entries:
                    spec = self._cache.specs[entry] if isinstance(entry, int) else entry
                    for position in positions:
                        announced += self._collect_one(position, (spec.kind, name), spec, now)
            else:
                self._collect_known(positions, entries, now, announced)
        if announced:
            self._announce(announced)
        if table.joins.requests:
            # The others may have been waiting for a while: with one rank less they can be stuck for good.
            self._check_deadlock()

    def _collect_known(
        self,
        positions: Sequence[int],
        entries: Sequence[Entry],
        now: float,
        announced: list[Response | KnownResponse],
    ) -> None:
        """The short way for specs that have a number, while nothing is out of the ordinary."""
        pending, since = self.table.pending, self.table.since
        for name, entry in entries:
            if type(entry) is not int:
                assert isinstance(entry, RequestSpec)
                for position in positions:
                    announced += self._collect_one(position, (entry.kind, name), entry, now)
                continue
            spec = self._cache.specs[entry]
            key = (spec.kind, name)
            asked = pending.get(key)
            if asked is None:
                asked = pending[key] = {}
                since[key] = now
            for position in positions:
                asked[position] = spec
            if len(asked) < len(self._ranks):
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

    def _fail_all(self, failure: HorovodInternalError) -> None:
        """A member has left a Join context with an exception: nothing runs until all members have left it."""
        self.failure = failure
        self._announce([self._fail(key, failure) for key in list(self.table.pending) if key != LEAVE_KEY])

    def _close_failure(self, response: Response) -> Response:
        """All have left: they go on from here."""
        failure, self.failure = self.failure, None
        end = replace(response.extra, failed=response.extra.failed or failure is not None, error=failure)
        return replace(response, extra=end)

    @in_loop
    def hear(self, what: str, position: int, value: Any) -> None:
        """A report of the member at `position`."""
        if what == WAITING:
            self.waits.report(position, replace(value, since=system.monotonic()))
            self._check_deadlock(self.waits.crossed(position))
        elif what == RESUMED:
            self.waits.resume(position)
        elif what == ANSWER:
            self.inspection.hear(position, value)
        elif what == FAILURE and self.failure is None:
            # First this, so that a member knows the reason when what it waits for fails.
            self._tell(FAILED, value)
            self._fail_all(value[1].error)

    @in_loop
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
                self._cache.number(response)
        if self._trace.recorder.on:
            self._trace.cycle()
        announcement = (list(responses), counts or {})
        if not self._cycle_seconds:
            self._tell(RESPONSES, announcement)
            return
        self._gathered.append(announcement)
        if len(self._gathered) == 1:
            self._loop.start(self._gather(), wake=False)

    def _gather(self) -> Coroutine[None]:
        yield from pause(self._cycle_seconds, Wait.POLL)
        gathered, self._gathered = self._gathered, []
        responses = [each for announced, _ in gathered for each in announced]
        counts = {kind: n for _, counts in gathered for kind, n in counts.items()}
        self._tell(RESPONSES, (responses, counts))

    def _check_deadlock(self, crossed: WaitForGraph | None = None) -> None:
        """crossed: a deadlock of some ranks in groups of torch.distributed."""
        waits, who, counts = self.waits, "no rank", None
        if crossed is not None:
            # The others may go on, and number what they ask for as before, even if they wait for these now.
            waits, who = crossed, "none of these ranks"
        elif waits.deadlocked(self._missing, self.table.joined, self.table.away):
            counts = waits.aligned_counts()
        else:
            return
        error = DeadlockError(f"{who} can go on: {waits.describe()}. {waits.advice()}")
        keys = [key for key in waits.waited_for() if key != JOIN_KEY]
        self._announce([self._fail(key, error) for key in keys], counts)

    def _missing(self, key: RequestKey) -> list[int]:
        """The ranks that have not asked for a request yet; none if it has been decided and is only slow."""
        return self.table.missing(key) if key in self.table.pending else []
