"""Agent: one RPC session on one worker. Sends requests, lets the requests of others be served, counts every message.

A worker may have ended its session already, or not yet begun the session of the sender. Messages for a later session
wait for it; a request for a session that has ended here is refused, so that its caller does not wait; other messages of
old sessions are dropped.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pickle import PickleBuffer
from typing import Any

import torch
from torch.autograd import profiler

from hvlike.errors import RpcError, UsageError, WorkerLostError
from hvlike.rpc.agent.options import RpcBackendOptions
from hvlike.rpc.agent.shutdown import SessionShutdown
from hvlike.rpc.wire.autograd_hooks import autograd_hooks, in_context
from hvlike.rpc.wire.devices import DeviceMaps
from hvlike.rpc.wire.message import (
    ANSWER,
    FAILURE,
    IDLE_REPORT,
    LEAVING,
    NOTICE,
    REFUSAL,
    REQUEST,
    STATUS_QUERY,
    Description,
    Packed,
    ServedRequest,
    WorkerInfo,
    describe_error,
)
from hvlike.system.system import of_process, system
from hvlike.transport.fabric import Fabric
from hvlike.transport.messages.traffic import Topic

Handler = Callable[[ServedRequest], None]
NoticeHandler = Callable[[int, Any, list[torch.Tensor]], None]

_autograd: Any = torch.autograd


@dataclass(eq=False, slots=True)
class Call:
    """A request on the worker that sends it, and later its reply."""

    agent: Agent
    rank: int  # The worker that serves it
    kind: int
    timeout: float  # Seconds; 0: none
    then: Callable[[Call], None] | None  # Runs in a pool thread when the call has ended
    deadline: float = math.inf  # In seconds of system.monotonic(), once it was sent
    done: bool = False
    reply: Packed | None = None  # The result, if the function returned
    failure: Any = None  # The Description of the exception, if the function raised
    error: Exception | None = None  # Why there is no reply: the time limit, a lost worker, a shutdown


class PendingCalls(dict[int, Call]):
    """The calls of one worker that have no reply yet, by number. A thread that pops a call ends it."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = count(1)

    def take(self, which: Callable[[Call], bool] = lambda call: True) -> list[Call]:
        ended = [self.pop(number, None) for number, call in list(self.items()) if which(call)]
        return [call for call in ended if call is not None]

    def next_deadline(self) -> float:
        return min((call.deadline for call in list(self.values())), default=math.inf)

    def ranks(self) -> Counter[int]:
        return Counter(call.rank for call in list(self.values()))


class Agent:
    """This worker among the workers of a session, from init_rpc to shutdown."""

    def __init__(
        self,
        fabric: Fabric,
        early: list[tuple[int, tuple[Any, ...], list[torch.Tensor]]],
        session: int,
        workers: tuple[WorkerInfo, ...],
        options: RpcBackendOptions,
        devices: DeviceMaps,
    ) -> None:
        """`begin` lets it receive. early: messages for later sessions of this fabric. workers: by rank."""
        self.rank = fabric.world.rank
        self.size = len(workers)
        self.workers = workers
        self.me = workers[self.rank]
        self.options = options
        self.devices = devices
        self.session = session
        self.timeout = options.rpc_timeout
        self.fabric = fabric
        self._loop = fabric.loop
        self._channel = fabric.channel
        self._early = early
        self._by_name = {worker.name: worker for worker in workers}
        self._handlers: dict[int, tuple[Handler, bool]] = {}
        self._notice_handlers: dict[int, NoticeHandler] = {}
        self._outbox: deque[tuple[int, int, tuple[Any, ...], list[torch.Tensor]]] = deque()
        self.lost: dict[int, str] = {}  # The workers that are known to be gone, with the reason
        self.vanished: set[int] = set()  # Those of them that have not left by themselves
        self.told: set[int] = set()  # Those whose loss this worker's program has met
        self.ended: str | None = None  # Why it is over here
        self._lock = system.Lock()
        self._works = 0
        self.pending = PendingCalls()
        self.open: dict[tuple[int, int], ServedRequest] = {}  # Requests not yet answered, by caller and number
        self.sent = [0] * self.size
        self.received = [0] * self.size  # How many messages were sent to each worker, and have come from each
        self.shutdown = SessionShutdown(self)
        self.rrefs: Any = None  # The RRefSession, to which all RRefs in messages of this session belong
        # Set by the RRefs. Calls `then` when the owners of all RRefs of a message know of them.
        self.when_confirmed: Callable[[Sequence[Any], Callable[[], None]], None] = lambda rrefs, then: then()
        # Set by the RRefs. Gets sender and reply of a call that has ended without it, in a pool thread.
        self.unwanted: Callable[[int, Packed], None] = lambda source, packed: None
        self.when_lost: list[Callable[[int, Exception], None]] = []  # For a worker that is gone, and why. In the loop.

    def begin(self) -> None:
        """Receive messages from now on, those that came early at once."""
        self._loop.thread_pool.allow(self.options.num_worker_threads)
        self._loop.watch_clock(self._expire)

        def replay() -> None:
            early = self._early[:]
            self._early.clear()
            for message in early:
                self._receive(*message)

        def connect() -> None:
            # From inside of the loop both are posted: no message comes in between.
            self._channel.listen(Topic.RPC, self._receive)
            self._loop.perform(replay)

        self._loop.perform(connect)

    def end(self, why: str, *, tell: bool) -> None:
        """Stop receiving; calls in flight and later calls fail with RuntimeError `why`. tell: the others know of it."""

        def leave() -> None:
            self.ended = why
            self.shutdown.leave(unexpected=tell)

        self._loop.perform(leave)
        self._loop.thread_pool.allow(0)
        for call in self.pending.take():
            self._finish(call, RpcError(why))

    @property
    def present(self) -> set[int]:
        return set(range(self.size)).difference(self.lost)

    @property
    def is_idle(self) -> bool:
        """True if this worker waits for nothing and serves nothing."""
        return not (self.open or self._works or self._outbox or len(self.pending))

    @property
    def is_recorded(self) -> bool:
        return self.fabric.recorder.on or profiler._is_profiler_enabled or bool(_autograd._profiler_enabled())

    def worker(self, to: object) -> WorkerInfo:
        """Return the worker of a name, a rank or a WorkerInfo.

        Raises: RuntimeError for an unknown worker, ValueError for anything that cannot name one.
        """
        if isinstance(to, WorkerInfo):
            to = to.id
        if isinstance(to, str):
            found = self._by_name.get(to)
        elif isinstance(to, int) and not isinstance(to, bool):
            found = self.workers[to] if 0 <= to < self.size else None
        else:
            raise UsageError(f"Cannot get WorkerInfo from name {to!r}: pass a worker's name, its rank or a WorkerInfo.")
        if found is None:
            names = ", ".join(worker.name for worker in self.workers[:16]) + (", ..." if self.size > 16 else "")
            raise RpcError(
                f"could not find destination {to!r}: {self.me.name} (rank {self.rank}) knows the workers {names}, with "
                f"the ranks 0 to {self.size - 1}."
            )
        return found

    def request(
        self, rank: int, kind: int, packed: Packed, *, timeout: float, then: Callable[[Call], None] | None = None
    ) -> Call:
        """Send a request and return its call. Blocks until it has ended, or `then` gets it in a pool thread."""
        call = Call(self, rank, kind, timeout, then)
        number = next(self.pending.numbers)
        self.pending[number] = call
        send = partial(self._send_request, call, number, packed)
        if then is not None:
            self._loop.perform(send)
            return call
        # This thread sends it as soon as it waits.
        self._loop.post(send, wake=False)
        if packed.note is not None:
            autograd_hooks().left(packed.note)
        self._loop.wait(lambda: call.done)
        return call

    def notify(self, rank: int, kind: int, value: tuple[Any, ...]) -> None:
        """Send a notice, which has no reply. From any thread and from finalizers: only queues it."""
        self._outbox.append((rank, kind, value, []))
        self._loop.post(self._empty_outbox)

    def post(
        self, rank: int, kind: int, value: tuple[Any, ...], storages: list[torch.Tensor], *, now: bool = True
    ) -> None:
        """Send a notice with storages, in order. From any thread. now: False if the caller drives the loop next."""
        self._outbox.append((rank, kind, value, storages))
        if now:
            self._loop.perform(self._empty_outbox)
        else:
            self._loop.post(self._empty_outbox, wake=False)

    def serve(self, kind: int, handler: Handler, *, in_loop: bool = False) -> None:
        """Run `handler` for every request of `kind`: among num_worker_threads, or in the loop if it cannot block."""
        self._handlers[kind] = handler, in_loop

    def hear(self, kind: int, handler: NoticeHandler) -> None:
        """Call `handler` with sender, value and storages of every notice of `kind`. In the loop: it must not block."""
        self._notice_handlers[kind] = handler

    def submit(self, work: Callable[[], None], *, limited: bool = False) -> None:
        """Run `work` in a pool thread; shutdown waits for it. From any thread. limited: among num_worker_threads."""
        with self._lock:
            self._works += 1
        self._loop.thread_pool.submit(partial(self._work, work, limited), limited=limited)

    def lose(self, errors: dict[int, str], *, vanished: bool = False) -> None:
        """Some workers are gone: calls to them fail, those in flight too. vanished: They have not left by themselves,
        and nobody waits for what they have asked for. In the loop.
        """
        if vanished:
            self.vanished.update(errors.keys() - self.lost.keys())
            for source, number in list(self.open):
                if source in errors:
                    del self.open[source, number]
        self.lost.update(errors)
        for rank in errors:
            for hook in list(self.when_lost):
                hook(rank, self._lost_error(rank))
        for call in self.pending.take(lambda call: call.rank in errors):
            self._finish(call, self._lost_error(call.rank))
        self.shutdown.lose()

    def _lost_error(self, rank: int) -> WorkerLostError:
        return WorkerLostError(self.lost[rank], [rank])

    def _receive(self, source: int, message: tuple[Any, ...], storages: list[torch.Tensor]) -> None:
        session, what, *rest = message
        if session != self.session or self.ended is not None:
            if session > self.session:
                self._early.append((source, message, storages))
            elif what == REQUEST:
                self._channel.send(source, Topic.RPC, (session, REFUSAL, rest[0]), [], kind="rpc")
            elif what in (STATUS_QUERY, IDLE_REPORT):
                # The worker that was to say that the session is over has been lost.
                self._channel.send(source, Topic.RPC, (session, LEAVING), [], kind="rpc")
            return
        if what >= STATUS_QUERY:
            self.shutdown.receive(source, what, rest)
            return
        self.received[source] += 1
        if what == REQUEST:
            number, body, kind, *note = rest
            request = ServedRequest(
                source, number, kind, Packed(body, storages, *note), system.monotonic(), self._respond
            )
            self.open[source, number] = request
            handler, in_loop = self._handlers[kind]
            if in_loop:
                handler(request)
            else:
                self._loop.thread_pool.submit(partial(self._serve, handler, request), limited=True)
            return
        if what == NOTICE:
            kind, value = rest
            self._notice_handlers[kind](source, value, storages)
            return
        call = self.pending.pop(rest[0], None)
        if call is None:
            # It ended without this reply, by its time limit.
            if what == ANSWER:
                self.submit(partial(self.unwanted, source, Packed(rest[1], storages, *rest[3:])))
            return
        error = None
        if what == ANSWER:
            call.reply = Packed(rest[1], storages, *rest[3:])
        elif what == FAILURE:
            call.failure = rest[1]
            if call.failure.lost is not None:
                self.told.update(call.failure.lost or self.lost)
        else:
            error = RpcError(f"RPC has been shut down on {self.workers[source].name} (rank {source}).")
        self._finish(call, error)

    def _send_request(self, call: Call, number: int, packed: Packed) -> None:
        rank = call.rank
        if self.ended is not None or rank in self.lost:
            if self.pending.pop(number, None) is not None:
                self._finish(call, RpcError(self.ended) if self.ended else self._lost_error(rank))
            return
        if call.timeout:
            call.deadline = system.monotonic() + call.timeout
            self._loop.due_at(call.deadline)
        self._send_packed(rank, REQUEST, number, call.kind, packed)

    def _send_packed(self, rank: int, what: int, number: int, kind: int, packed: Packed) -> None:
        body: Any = packed.body
        if type(body) is bytearray and rank != self.rank:
            # Long: out of band. A worker that calls itself gets the object itself.
            body = PickleBuffer(body)
        message = (self.session, what, number, body, kind)
        self._send(rank, message if packed.note is None else (*message, packed.note), packed.storages)

    def _send(self, rank: int, message: tuple[Any, ...], storages: list[torch.Tensor]) -> None:
        self.sent[rank] += 1
        self._channel.send(rank, Topic.RPC, message, storages, kind="rpc")

    def _empty_outbox(self) -> None:
        while self._outbox:
            rank, kind, value, storages = self._outbox[0]
            if self.ended is None and rank not in self.lost:
                self._send(rank, (self.session, NOTICE, kind, value), storages)
            # Only now: a notice in the outbox keeps the session from being idle.
            self._outbox.popleft()
        self.shutdown.check()

    def _finish(self, call: Call, error: Exception | None) -> None:
        if isinstance(error, WorkerLostError):
            self.told.update(error.ranks)
        call.error = error
        call.done = True
        if call.then is not None:
            self.submit(partial(call.then, call))
        elif self.shutdown.begun:
            self.shutdown.check()

    def _expire(self, now: float) -> float:
        for call in self.pending.take(lambda call: call.deadline <= now):
            text = (
                f"RPC ran for more than set timeout ({call.timeout * 1000:.0f} ms) and will now be marked with an "
                f"error: no answer to {self.me.name} (rank {self.rank}) from {self.workers[call.rank].name} "
                f"(rank {call.rank})."
            )
            self._finish(call, RpcError(text))
        return self.pending.next_deadline()

    def _serve(self, handler: Handler, request: ServedRequest) -> None:
        """In a pool thread."""
        if self.ended is not None:
            # The request waited for a thread until after the session; its caller has been told.
            return
        try:
            if request.packed.note is None:
                handler(request)
            else:
                with in_context(request.packed.context):
                    handler(request)
        except BaseException as error:
            request.answer(error)

    def _respond(self, request: ServedRequest, result: Packed | BaseException | Description) -> None:
        source, number = request.source, request.number
        if isinstance(result, BaseException):
            result = describe_error(result, self.me)

        def send() -> None:
            if self.ended is not None or source in self.lost:
                pass
            elif isinstance(result, Packed):
                self._send_packed(source, ANSWER, number, request.kind, result)
            else:
                self._send(source, (self.session, FAILURE, number, result), [])
            self.open.pop((source, number), None)
            if self.shutdown.begun:
                self.shutdown.check()

        if not request.answers_last:
            self._loop.perform(send)
            return
        self._loop.post(send, wake=False)
        if isinstance(result, Packed) and result.note is not None:
            autograd_hooks().left(result.note)

    def _work(self, work: Callable[[], None], limited: bool) -> None:
        try:
            if not limited or self.ended is None:
                work()
        finally:
            with self._lock:
                self._works -= 1
            if self.shutdown.begun:
                self._loop.perform(self.shutdown.check)


class _CurrentAgent:
    def __init__(self) -> None:
        self.agent: Agent | None = None


_process = of_process(_CurrentAgent)


def current_agent() -> Agent:
    """Return the agent of the running session. Raises: RuntimeError before init_rpc and after shutdown."""
    agent = _process.agent
    if agent is None:
        raise RpcError("RPC has not been initialized. Call hvlike.rpc.init_rpc first.")
    return agent


def is_running() -> bool:
    """Return whether this worker is between init_rpc and shutdown."""
    return _process.agent is not None


def set_agent(agent: Agent | None) -> None:
    """Make `agent` the agent of this process; None after the session."""
    _process.agent = agent
