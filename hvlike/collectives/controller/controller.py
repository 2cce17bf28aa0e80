"""Negotiation: named requests come in any order on each rank; the coordinator announces one order for all.

    submit        any thread: the request goes into the tensor queue and to the coordinator
    coordinator   on the first rank: compares what all members ask for and sends a response list
    run           every rank runs the responses of one message in its order

How messages travel between several nodes: member_tree.py. A spec that was announced once is referred to by its number
from then on (ResponseCache).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from hvlike.backends.cuda.runtime import KINDS, events_of
from hvlike.backends.op_queue import Job
from hvlike.backends.operation import Operation
from hvlike.collectives.controller.coordinator import Coordinator, ResponseCache, ResponseList
from hvlike.collectives.controller.inline_agreement import HURRY, PASS, Agreement
from hvlike.collectives.controller.member_tree import (
    ANSWER,
    END,
    FAILED,
    FAILURE,
    INSPECT,
    READY,
    RESPONSES,
    RESUMED,
    WAITING,
    MemberTree,
)
from hvlike.collectives.controller.positions import Positions
from hvlike.collectives.controller.tensor_queue import AutomaticNames, TensorQueue
from hvlike.collectives.controller.trace import Trace
from hvlike.collectives.health.departures import Errors
from hvlike.collectives.health.stall_inspector import (
    PING,
    PONG,
    PeerProbe,
    StallInspector,
    StallLimits,
    StatusReply,
    Submission,
    answer_of,
    describe_tensors,
)
from hvlike.collectives.health.wait_for_graph import STEP, WaitReport
from hvlike.collectives.requests.join_protocol import JOIN_KEY, LEAVE_KEY, JoinFailure
from hvlike.collectives.requests.message_table import Entry, ReadyList, Response
from hvlike.collectives.requests.request import CallSite, Request, RequestKey, RequestSpec, find_call_site
from hvlike.errors import HorovodInternalError
from hvlike.observe.log import main_stack
from hvlike.system.system import system
from hvlike.transport.fabric import Fabric
from hvlike.transport.host import mpi_library
from hvlike.transport.loop.coroutine import in_loop
from hvlike.transport.world import Group

PATIENCE_SECONDS = 0.5  # How long a rank waits before it reports the wait. Deadlocks are found among reported waits.

Runner = Callable[[list[tuple[Request, Response]]], None]


class Controller:
    def __init__(
        self,
        fabric: Fabric,
        group: Group,
        run: Runner,
        end: Callable[[HorovodInternalError], None],
        limits: StallLimits,
        capacity: int,
        cycle_seconds: float,
        trace: Trace,
    ) -> None:
        """run: carries out what was agreed; end: ends everything with an error."""
        self.names = AutomaticNames()
        self.positions = Positions(fabric.loop.perform)
        self.stand_in: Callable[[Response], Request | None] = lambda response: None  # Of a rank that has joined
        self.tensor_queue = TensorQueue(fabric.world.rank)
        self.agreement: Agreement | None = None  # Of members that may agree without the coordinator
        self._loop = fabric.loop
        self._run = run
        self._trace = trace
        self._end = end
        self._cache = cache = ResponseCache(capacity)
        self._tree = tree = MemberTree(fabric, group, lambda number: cache.specs[number].kind)
        neighbours = [group.ranks[position] for position in group.node]
        look = fabric.look_at
        self._probe = PeerProbe(fabric.loop, tree.me, group.ranks[0], tree.parent, neighbours, tree.send, look, limits)
        self._coordinator: Coordinator | None = None
        if group.rank == 0:
            inspection = StallInspector(group.ranks, partial(self._tell_all, INSPECT), limits, look)
            announce = partial(self.hear, tree.me)
            self._coordinator = Coordinator(group.ranks, announce, fabric.loop, inspection, cache, cycle_seconds, trace)
        self._handlers: dict[str, Callable[[int, Any], None]] = {
            RESPONSES: self._obey,
            READY: self._collect,
            INSPECT: lambda rank, number: tree.send(rank, ANSWER, (tree.position, self._answer(number))),
            END: lambda rank, error: end(error),
            PING: lambda rank, asked: tree.send(rank, PONG, answer_of(asked)),
            PONG: self._probe.hear,
        }

    # -- any thread -----------------------------------------------------------------------------

    def submit(
        self,
        spec: RequestSpec,
        name: str,
        tensors: Sequence[torch.Tensor],
        finish: Callable[[Request], Any],
        *,
        wake: bool = True,
        job: Callable[[Any], Job] | None = None,
        counted: bool = False,
        home: torch.device | None = None,
    ) -> Operation:
        """Put an operation in flight; `wake=False`: the caller waits. Raises: DuplicateNameError, ShutdownError.

        job, home: see Request. counted: an inline attempt has numbered it before.
        """
        request = Request(name, spec, tensors, finish, job=job, place=find_call_site(), home=home)
        if spec.device in KINDS:
            request.ready = events_of(spec.device, tensors)
        self.tensor_queue.enter(request, counted=counted)
        if self._trace.recorder.on:
            self._trace.submitted(request)
        operation = request.operation
        operation.waiter = partial(self.wait, request.key)
        self.tensor_queue.outbox.append(request)
        self._loop.post(self._flush, wake=wake)
        return operation

    def wait(
        self,
        key: RequestKey,
        done: Callable[[], bool],
        timeout: float | None,
        *,
        certain: bool = True,
        number: int = 0,
        detail: str = "",
    ) -> bool:
        """Wait for the operation `key`; tells the coordinator when that takes long. Without time: one turn of work.

        certain: see WaitReport, as for number and detail. False where the peers answer whatever they wait for, however
        late.
        """
        if mpi_library.ForkMark.forked:
            mpi_library.check_not_forked()
        loop = self._loop
        if timeout is not None and timeout <= 0:
            loop.turn()
            return done()
        patience = PATIENCE_SECONDS if timeout is None else min(timeout, PATIENCE_SECONDS)
        if loop.wait(done, patience):
            return True
        if timeout is not None and timeout <= patience:
            return False
        # With several threads another one may still ask for what the peers lack.
        certain = certain and self.tensor_queue.has_one_thread()
        waiting = WaitReport(key, self.names.counts(), self.positions.copy(), certain, number=number, detail=detail)
        calls = self.positions.calls
        if calls is not None:
            waiting = replace(waiting, calls=calls.made(), certain=certain and not calls.may_go_on())
        loop.post(lambda: self._report(WAITING, waiting), wake=False)
        try:
            return self._wait_on(key, done, None if timeout is None else timeout - patience)
        finally:
            loop.post(lambda: self._report(RESUMED, None), wake=False)

    def wait_in_order(
        self,
        name: str,
        number: int,
        done: Callable[[], bool],
        stop: Callable[[HorovodInternalError], None],
        *,
        place: CallSite,
        detail: str = "",
        certain: bool = True,
    ) -> None:
        """Wait for operation `number` of an order that goes without the coordinator (positions.py).

        stop: ends it, in the loop, where no rank can go on. place, detail: for reports. certain: see `wait`.
        """
        key = (STEP, name)
        self.tensor_queue.notice(key, place)
        ended = self.positions.wait_begins(name, number, place, detail, stop)
        try:
            self.wait(key, done, None, certain=certain)
        finally:
            ended()

    def _wait_on(self, key: RequestKey, done: Callable[[], bool], timeout: float | None) -> bool:
        """Go on waiting; see now and then whether the others are still there, where the coordinator cannot."""
        loop, seconds = self._loop, self._probe.limits.shortest
        if seconds is None or timeout is not None:
            return loop.wait(done, timeout)
        began = system.monotonic()
        while not loop.wait(done, seconds):
            agreed = key[0] != STEP and key not in self.tensor_queue.requests
            error = self._probe.check(key, system.monotonic() - began + PATIENCE_SECONDS, agreed, done)
            if error is not None:
                loop.post(partial(self._end, error), wake=False)
        return True

    def send_soon(self, rank: int, what: str, value: Any, *, wake: bool = False) -> None:
        """Have `hear` called on a member; without `wake` the caller is about to drive the loop, or in it."""
        self._loop.post(partial(self._tree.send, rank, what, value), wake=wake)

    def report_failure(self, number: int, failure: JoinFailure) -> None:
        self._loop.post(lambda: self._report(FAILURE, (number, failure)))

    # -- in the loop: as a member ---------------------------------------------------------------

    def listen(self, what: str, hear: Callable[[int, Any], None]) -> None:
        """Have `hear` called with the sender and the value of messages of a kind that the controller does not know."""
        self._handlers[what] = hear

    def agree_by(self, agreement: Agreement) -> None:
        """Let the members agree without the coordinator from now on, too."""
        self.agreement = agreement
        self.listen(PASS, lambda rank, index: agreement.hear(rank, PASS, index))
        self.listen(HURRY, lambda rank, index: agreement.hear(rank, HURRY, index))

    @in_loop
    def hear(self, rank: int, what: str, value: Any) -> None:
        if what in (RESPONSES, FAILED):
            self._tree.pass_down(what, value)
        handler = self._handlers.get(what)
        if handler is not None:
            handler(rank, value)
        else:
            self._pass_on(what, *value)

    @in_loop
    def _collect(self, rank: int, ready: ReadyList) -> None:
        """This rank asks for something, or those below it do."""
        if self._coordinator is not None:
            self._coordinator.collect(ready)
        else:
            self._tree.ask(ready, at_once=self._trace.recorder.on)

    @in_loop
    def _pass_on(self, what: str, position: int, value: Any) -> None:
        """A report of the member at `position`."""
        if self._coordinator is not None:
            self._coordinator.hear(what, position, value)
        else:
            self._tree.report(what, (position, value))

    @in_loop
    def watch(self) -> None:
        """On the coordinator, look for stalls; on a leader, send on what it has; called about four times a second."""
        self._tree.flush()
        if self._coordinator is not None and self.tensor_queue.closed is None:
            coordinator = self._coordinator
            error = coordinator.inspection.watch(coordinator.table, coordinator.waits)
            if error is not None:
                self._tell_all(END, error)

    @in_loop
    def lose(self, errors: Errors) -> None:
        if self.agreement is not None:
            self.agreement.stop()
        if self._coordinator is not None:
            self._coordinator.lose(errors)

    @in_loop
    def lose_parent(self, errors: Errors) -> None:
        """If the ranks that have left include the coordinator, or that through which this one speaks: fail what it has
        not answered, and what comes.
        """
        gone = next((rank for rank in (self._tree.parent, self._tree.ranks[0]) if rank in errors), None)
        if gone is None or self._coordinator is not None:
            return
        error = errors[gone]
        self._tree.close()
        for request in self.tensor_queue.close(error):
            kind, name = request.key
            text = f"{kind} {name!r} cannot be completed: rank {gone} will not take part. {error}"
            request.operation.end(type(error)(text))

    @in_loop
    def close(self, error: HorovodInternalError) -> None:
        if self.agreement is not None:
            self.agreement.stop()
        self._tree.close()
        for request in self.tensor_queue.close(error):
            request.operation.end(error)
        self.positions.close(error)

    def in_flight(self) -> dict[str, int]:
        """How many requests of this rank, requests known to the coordinator and reported waits are not over."""
        coordinator = self._coordinator
        return {
            "requests": len(self.tensor_queue.requests) + len(self.tensor_queue.outbox),
            "pending": len(coordinator.table.pending) if coordinator else 0,
            "waiting": len(coordinator.waits.waits) if coordinator else 0,
        }

    @in_loop
    def _flush(self) -> None:
        outbox, numbers = self.tensor_queue.outbox, self._cache.numbers
        entries: list[Entry] = []
        while outbox:
            request = outbox.popleft()
            number = numbers.get(request.spec)
            entries.append((request.name, request.spec if number is None else number))
        if entries:
            self._collect(self._tree.me, [((self._tree.position,), entries)])

    @in_loop
    def _report(self, what: str, value: Any) -> None:
        self._pass_on(what, self._tree.position, value)

    @in_loop
    def _tell_all(self, what: str, value: Any) -> None:
        self._tree.send_to_all(what, value)
        self.hear(self._tree.me, what, value)

    @in_loop
    def _obey(self, rank: int, announcement: ResponseList) -> None:
        """Run what the coordinator has announced."""
        announced, counts = announcement
        responses = self._cache.expand(announced)
        if counts:
            self.names.align(counts)
        news = [each for each in announced if isinstance(each, Response)]
        if counts or news:
            self._begin_epoch_after(news, responses, aligned=bool(counts))
        agreed = []
        trace, node_table = self._trace, self._tree.table
        for response in responses:
            if trace.recorder.on:
                trace.decided(response)
            else:
                trace.serial += 1
            if node_table is not None:
                node_table.decided(response.key)
            request = self.tensor_queue.leave(response.key)
            if response.error is not None:
                self._fail(request, response)
                continue
            # Decided without this rank: it has joined.
            request = request or self.stand_in(response)
            if request is not None:
                agreed.append((request, response))
        if agreed:
            self._run(agreed)

    def _begin_epoch_after(self, news: Sequence[Response], responses: Sequence[Response], *, aligned: bool) -> None:
        """Where the ranks may have asked for different numbers of things, all go on from here. aligned: they have."""
        joined = any(each.key in (JOIN_KEY, LEAVE_KEY) for each in news)
        if aligned or joined or any(each.error is not None for each in news):
            self.tensor_queue.begin_epoch([each.key for each in responses])
            if self.agreement is not None:
                self.agreement.begin_epoch(joined=joined)

    def _fail(self, request: Request | None, response: Response) -> None:
        assert response.error is not None
        if request is not None:
            request.operation.end(response.error)
        else:
            self.positions.stop(response.key, response.error)

    def unfinished(self) -> dict[RequestKey, Submission]:
        """What this rank has asked for or waits for, and is not over; any thread."""
        now = system.monotonic()
        found = {
            key: Submission(
                key, str(request.place), now - request.time, describe_tensors(request.spec.shapes, request.spec.dtypes)
            )
            for key, request in list(self.tensor_queue.requests.items())
        }
        found.update(self.positions.submissions(now))
        return found

    def _answer(self, number: int) -> StatusReply:
        now = system.monotonic()
        last = None
        if self.tensor_queue.last is not None:
            key, place, since = self.tensor_queue.last
            last = Submission(key, str(place), now - since)
        return StatusReply(number, self.unfinished(), last, self.positions.copy(), main_stack())
