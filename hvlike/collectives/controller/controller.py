"""Negotiation: named requests come in any order on each rank; the coordinator announces one order for all.

    submit        any thread: the request goes into the tensor queue and to the coordinator
    coordinator   on the first rank: compares what all members ask for and sends a response list
    run           every rank runs the responses of one message in its order

On several nodes the first member of each speaks for the others of its node (NodeTable): what they say goes through
it in their order, and so do the announcements. Only what is asked and said about ranks that hang goes directly.

A spec that was announced once is referred to by its number from then on. Only `submit` and `wait` may be called from
any thread; the rest runs in the loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch

from hvlike.backends.cuda.runtime import KINDS, events_of
from hvlike.backends.op_queue import Job
from hvlike.backends.operation import Operation
from hvlike.collectives.controller.coordinator import Coordinator, KnownResponse, ResponseList
from hvlike.collectives.controller.inline_agreement import HURRY, PASS, Agreement
from hvlike.collectives.controller.owner_names import OwnerNames
from hvlike.collectives.controller.positions import Positions
from hvlike.collectives.controller.tensor_queue import AutomaticNames, TensorQueue
from hvlike.collectives.controller.trace import Trace
from hvlike.collectives.health.departures import Errors
from hvlike.collectives.health.option_watch import OptionWatch
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
from hvlike.collectives.requests.message_table import Entry, NodeTable, ReadyList, Response, tree_of
from hvlike.collectives.requests.request import CallSite, Request, RequestKey, RequestSpec, find_call_site
from hvlike.errors import HorovodInternalError
from hvlike.observe.log import main_stack
from hvlike.system.system import system
from hvlike.transport.fabric import Fabric
from hvlike.transport.host import mpi_library
from hvlike.transport.loop.coroutine import Coroutine, Wait, pause
from hvlike.transport.messages.traffic import Topic
from hvlike.transport.world import Group

PATIENCE_SECONDS = 0.5  # How long a rank waits before it reports the wait. Deadlocks are found among reported waits.
READY, RESPONSES, WAITING, RESUMED = "ready", "responses", "waiting", "resumed"
INSPECT, ANSWER, END = "inspect", "answer", "end"
FAILURE, FAILED, OPTIONS = "failure", "failed", "options"

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
        self.cycle_seconds = cycle_seconds  # How long the coordinator gathers what is ready before it announces it
        self.names = AutomaticNames()
        self.optimizer_names = OwnerNames()  # In the order of first use; join() leaves no gap to align
        self.positions = Positions(fabric.loop.perform)
        self.stand_in: Callable[[Response], Request | None] = lambda response: None  # Of a rank that has joined
        # Told in the loop which Join context, by its number, a member has left by an exception.
        self.on_failure: Callable[[int, JoinFailure], None] = lambda number, failure: None
        self.watches: WeakValueDictionary[str, OptionWatch] = WeakValueDictionary()  # By the names of plans
        self._fabric = fabric
        self._group = group
        self._run = run
        self._trace = trace
        self._end = end
        self.tensor_queue = TensorQueue(fabric.world.rank)
        self.agreement: Agreement | None = None  # Of members that may agree without the coordinator
        self._outbox: deque[Request] = deque()
        self._numbers: dict[RequestSpec, int] = {}  # Of the specs that were announced; what members send in their place
        self._known: dict[int, tuple[RequestSpec, Any]] = {}  # And `Response.extra`, which follows from the spec
        parent, children = tree_of(group.nodes, group.rank)
        self._parent, self._children = group.ranks[parent], [group.ranks[position] for position in children]
        self._node_table: NodeTable | None = None  # On a rank that speaks for others
        if group.rank != 0 and children:
            self._node_table = NodeTable(group.local_size, lambda number: self._known[number][0].kind)
        me, neighbours = fabric.world.rank, [group.ranks[position] for position in group.node]
        look = fabric.look_at
        self._probe = PeerProbe(fabric.loop, me, group.ranks[0], self._parent, neighbours, self._send, look, limits)
        self._gathered: list[ResponseList] = []
        self._coordinator: Coordinator | None = None
        if group.rank == 0:
            inspection = StallInspector(
                group.ranks, lambda number: self._tell_all(INSPECT, number), limits, fabric.look_at
            )
            self._coordinator = Coordinator(group.ranks, self._announce, inspection, capacity, trace)

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
        self._outbox.append(request)
        self._fabric.loop.post(self._flush, wake=wake)
        return operation

    def wait(self, key: RequestKey, done: Callable[[], bool], timeout: float | None, *, certain: bool = True) -> bool:
        """Wait for the operation `key`; tells the coordinator when that takes long. Without time: one turn of work.

        certain: see WaitReport. False where the peers answer whatever they wait for, however late.
        """
        if mpi_library.ForkMark.forked:
            mpi_library.check_not_forked()
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
        certain = certain and self.tensor_queue.has_one_thread()
        waiting = WaitReport(key, self.names.counts(), self.positions.copy(), certain)
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
        loop, seconds = self._fabric.loop, self._probe.limits.shortest
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
        self._fabric.loop.post(partial(self._send, rank, what, value), wake=wake)

    def report_failure(self, number: int, failure: JoinFailure) -> None:
        self._fabric.loop.post(lambda: self._report(FAILURE, (number, failure)))

    # -- in the loop: as a member ---------------------------------------------------------------

    def hear(self, rank: int, what: str, value: Any) -> None:
        coordinator = self._coordinator
        if what == RESPONSES:
            for child in self._children:
                self._send(child, what, value)
            self._obey(*value)
        elif what == READY:
            if coordinator is not None:
                coordinator.collect(value)
            elif self._node_table is not None:
                self._tell_ready(self._node_table.collect(value, at_once=self._trace.recorder.on))
        elif what == INSPECT:
            self._send(self._group.ranks[0], ANSWER, (self._group.rank, self._answer(value)))
        elif what == END:
            self._end(value)
        elif what == PING:
            self._send(rank, PONG, answer_of(value))
        elif what == PONG:
            self._probe.hear(rank, value)
        elif what == FAILED:
            for child in self._children:
                self._send(child, what, value)
            self.on_failure(*value)
        elif what == OPTIONS:
            watch = self.watches.get(value[0])
            if watch is not None:
                watch.hear(rank, *value[1:])
        elif self.agreement is not None and what in (PASS, HURRY):
            self.agreement.hear(rank, what, value)
        else:
            self._pass_on(what, *value)

    def _pass_on(self, what: str, position: int, value: Any) -> None:
        """A report of the member at `position`; on its way to the coordinator it overtakes no request."""
        coordinator = self._coordinator
        if coordinator is None:
            if self._node_table is not None:
                self._tell_ready(self._node_table.take())
            if self.tensor_queue.closed is None:
                self._send(self._parent, what, (position, value))
        elif what == WAITING:
            coordinator.waiting(position, value)
        elif what == RESUMED:
            coordinator.waits.resume(position)
        elif what == ANSWER:
            coordinator.inspection.hear(position, value)
        elif what == FAILURE and coordinator.failure is None:
            # First this, so that a member knows the reason when what it waits for fails.
            self.hear(self._fabric.world.rank, FAILED, value)
            coordinator.fail_all(value[1].error)

    def watch(self) -> None:
        """On the coordinator, look for stalls; on a leader, send on what it has; called about four times a second."""
        if self._node_table is not None:
            self._tell_ready(self._node_table.take())
        if self._coordinator is not None and self.tensor_queue.closed is None:
            coordinator = self._coordinator
            error = coordinator.inspection.watch(coordinator.table, coordinator.waits)
            if error is not None:
                self._tell_all(END, error)

    def lose(self, errors: Errors) -> None:
        if self.agreement is not None:
            self.agreement.stop()
        if self._coordinator is not None:
            self._coordinator.lose(errors)

    def lose_parent(self, errors: Errors) -> None:
        """If the ranks that have left include the coordinator, or that through which this one speaks: fail what it has
        not answered, and what comes.
        """
        gone = next((rank for rank in (self._parent, self._group.ranks[0]) if rank in errors), None)
        if gone is None or self._coordinator is not None:
            return
        error = errors[gone]
        for request in self.tensor_queue.close(error):
            kind, name = request.key
            text = f"{kind} {name!r} cannot be completed: rank {gone} will not take part. {error}"
            request.operation.end(type(error)(text))

    def close(self, error: HorovodInternalError) -> None:
        if self.agreement is not None:
            self.agreement.stop()
        for request in self.tensor_queue.close(error):
            request.operation.end(error)
        self.positions.close(error)

    def in_flight(self) -> dict[str, int]:
        """How many requests of this rank, requests known to the coordinator and reported waits are not over."""
        coordinator = self._coordinator
        return {
            "requests": len(self.tensor_queue.requests) + len(self._outbox),
            "pending": len(coordinator.table.pending) if coordinator else 0,
            "waiting": len(coordinator.waits.waits) if coordinator else 0,
        }

    def _flush(self) -> None:
        entries: list[Entry] = []
        while self._outbox:
            request = self._outbox.popleft()
            number = self._numbers.get(request.spec)
            entries.append((request.name, request.spec if number is None else number))
        if not entries:
            return
        ready: ReadyList = [((self._group.rank,), entries)]
        if self._coordinator is not None:
            self._coordinator.collect(ready)
        elif self._node_table is not None:
            self.hear(self._fabric.world.rank, READY, ready)
        else:
            self._send(self._parent, READY, ready)

    def _tell_ready(self, ready: ReadyList) -> None:
        # Once this rank has left, nothing can run any more: its members hear that from others.
        if ready and self.tensor_queue.closed is None:
            self._send(self._parent, READY, ready)

    def _report(self, what: str, value: Any) -> None:
        self._pass_on(what, self._group.rank, value)

    def _send(self, rank: int, what: str, value: Any) -> None:
        self._fabric.channel.send(rank, Topic.CONTROLLER, (self._group.number, what, value), kind=what)

    def _tell_all(self, what: str, value: Any) -> None:
        for rank in self._group.ranks[1:]:
            self._send(rank, what, value)
        self.hear(self._fabric.world.rank, what, value)

    def _announce(self, announcement: ResponseList) -> None:
        if self.cycle_seconds:
            self._gathered.append(announcement)
            if len(self._gathered) == 1:
                self._fabric.loop.start(self._gather(), wake=False)
            return
        for rank in self._children:
            self._send(rank, RESPONSES, announcement)
        self._obey(*announcement)

    def _gather(self) -> Coroutine[None]:
        yield from pause(self.cycle_seconds, Wait.POLL)
        gathered, self._gathered = self._gathered, []
        responses = [each for announced, _ in gathered for each in announced]
        counts = {kind: n for _, counts in gathered for kind, n in counts.items()}
        self.hear(self._fabric.world.rank, RESPONSES, (responses, counts))

    def _obey(self, responses: list[Response | KnownResponse], counts: Mapping[str, int]) -> None:
        if counts:
            self.names.align(counts)
        new_epoch, joined = bool(counts), False
        for each in responses:
            if isinstance(each, Response):
                joined = joined or each.key in (JOIN_KEY, LEAVE_KEY)
                new_epoch = new_epoch or joined or each.error is not None
        if new_epoch:
            # The ranks may have asked for different numbers of things: all go on from here.
            decided = [
                each.key if isinstance(each, Response) else (self._known[each[1]][0].kind, each[0])
                for each in responses
            ]
            self.tensor_queue.begin_epoch(decided)
            if self.agreement is not None:
                self.agreement.begin_epoch(joined=joined)
        agreed = []
        trace, node_table = self._trace, self._node_table
        for each in responses:
            if isinstance(each, Response):
                response = each
                if response.number is not None:
                    self._numbers[response.spec] = response.number
                    self._known[response.number] = (response.spec, response.extra)
            else:
                name, number, last = each
                spec, extra = self._known[number]
                response = Response((spec.kind, name), spec, extra, None, True, last, number)
            if trace.recorder.on:
                trace.decided(response)
            else:
                trace.serial += 1
            if node_table is not None:
                node_table.decided(response.key)
            request = self.tensor_queue.leave(response.key)
            if response.error is not None:
                if request is not None:
                    request.operation.end(response.error)
                else:
                    self.positions.stop(response.key, response.error)
                continue
            # Decided without this rank: it has joined.
            request = request or self.stand_in(response)
            if request is not None:
                agreed.append((request, response))
        if agreed:
            self._run(agreed)

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
