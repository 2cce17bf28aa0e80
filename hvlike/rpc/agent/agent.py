"""Agent: one RPC session on one worker. Sends requests, has the requests of others served, and counts every message."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from hvlike.errors import RpcError, UsageError, WorkerLostError
from hvlike.rpc.agent.options import RpcBackendOptions
from hvlike.rpc.agent.routing import ANSWER, FAILURE, NOTICE, REQUEST, STATUS_QUERY, PendingCalls, SessionRouter
from hvlike.rpc.agent.shutdown import SessionShutdown
from hvlike.rpc.wire import autograd_hooks
from hvlike.rpc.wire.autograd_hooks import in_context
from hvlike.rpc.wire.devices import DeviceMaps
from hvlike.rpc.wire.message import Call, Description, Packed, Request, WorkerInfo, describe_error
from hvlike.rpc.wire.single_tensor import as_buffer
from hvlike.transport.fabric import Fabric

Handler = Callable[[Request], None]
Hearer = Callable[[int, tuple[Any, ...]], None]
Taker = Callable[[int, tuple[Any, ...], list[torch.Tensor]], None]


class Agent:
    """This worker among the workers of a session, from init_rpc to shutdown."""

    def __init__(
        self,
        fabric: Fabric,
        switchboard: SessionRouter,
        session: int,
        workers: tuple[WorkerInfo, ...],
        options: RpcBackendOptions,
        devices: DeviceMaps,
    ) -> None:
        """workers: by rank. Local; `begin` opens it for the messages of the others."""
        self.rank = fabric.world.rank
        self.size = len(workers)
        self.workers = workers
        self.me = workers[self.rank]
        self.options = options
        self.devices = devices
        self.session = session
        self.timeout = options.rpc_timeout
        """Seconds that a call may take which does not say itself."""
        self.fabric = fabric
        self._loop = fabric.loop
        self._switchboard = switchboard
        self._by_name = {worker.name: worker for worker in workers}
        self._handlers: dict[int, tuple[Handler, bool]] = {}
        self._takers: dict[int, Taker] = {}
        self._outbox: deque[tuple[int, int, tuple[Any, ...], list[torch.Tensor]]] = deque()
        self._lost: dict[int, str] = {}
        self._ended: str | None = None
        self._lock = threading.Lock()
        self._works = 0
        self.pending = PendingCalls()
        self.open: dict[tuple[int, int], Request] = {}
        """Requests that have come and are not answered, by caller and number."""
        self.sent = [0] * self.size
        """Messages that have left for each worker."""
        self.received = [0] * self.size
        """Messages that have come from each worker."""
        self.parting = SessionShutdown(self, switchboard)
        self.unwanted: Callable[[int, int, Packed], None] = lambda kind, source, packed: None
        """Given the answer to a call that has ended without it: its kind, who sent it, what. In a thread of its own."""
        self.when_lost: list[Callable[[int, Exception], None]] = []
        """Told of every worker that is gone, and how. In the loop."""

    # -- the session --------------------------------------------------------------------------

    def begin(self) -> None:
        """Take messages from now on, those that came early at once."""
        self._loop.thread_pool.allow(self.options.num_worker_threads)
        self._loop.watch_clock(self._expire)
        self._switchboard.begin(self.session, self._receive)

    def end(self, why: str, *, tell: bool) -> None:
        """Take no more; calls in flight and to come fail with RuntimeError `why`.

        tell: the others may still need this worker and are told that it is gone.
        """

        def leave() -> None:
            self._ended = why
            if tell:
                self.parting.depart()

        self._loop.perform(leave)
        self._switchboard.end()
        self._loop.thread_pool.allow(0)
        for call in self.pending.take_all():
            self._finish(call, RpcError(why))

    @property
    def lost(self) -> dict[int, str]:
        """The workers that are known to be gone, and how."""
        return self._lost

    @property
    def present(self) -> set[int]:
        """The workers that are not known to be gone."""
        return set(range(self.size)).difference(self._lost)

    @property
    def is_idle(self) -> bool:
        """True when nothing is in flight from here and nothing is being served here."""
        return not (self.open or self._works or self._outbox or len(self.pending))

    def worker(self, to: object) -> WorkerInfo:
        """The worker of that name or rank.

        Raises: RuntimeError for one that is not there, ValueError for something that cannot name one.
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

    # -- as a caller --------------------------------------------------------------------------

    def request(
        self,
        rank: int,
        kind: int,
        packed: Packed,
        *,
        timeout: float,
        then: Callable[[Call], None] | None = None,
        now: bool = True,
    ) -> Call:
        """Ask a worker to serve a request. From any thread; does not block.

        timeout: seconds, 0 for none. then: run in a thread of its own time when the call has ended, well or badly.
        now: False when the caller is about to wait for the call, which sends it.
        """
        call = Call(rank, kind, timeout, then)
        number = self.pending.add(call)
        send = partial(self._send_request, call, number, packed)
        if now:
            self._loop.perform(send)
        else:
            self._loop.post(send, wake=False)
            self._note_leaving(packed)
        return call

    def wait(self, call: Call) -> None:
        """Block until the call has ended."""
        self._loop.wait(lambda: call.done)

    def wait_until(self, done: Callable[[], bool], seconds: float | None = None) -> bool:
        """Block until `done()`; False when `seconds` ran out first."""
        return self._loop.wait(done, seconds)

    def notify(self, rank: int, kind: int, value: tuple[Any, ...]) -> None:
        """Tell a worker something that has no answer. From any thread and finaliser: only puts it down here."""
        self._outbox.append((rank, kind, value, []))
        self._loop.post(self._empty_outbox)

    def post(
        self, rank: int, kind: int, value: tuple[Any, ...], storages: list[torch.Tensor], *, now: bool = True
    ) -> None:
        """The same with memory, see Packed. From any thread; does not block; notices to one worker arrive in order.

        now: False when the caller is about to wait, or to listen again: then that sends it.
        """
        self._outbox.append((rank, kind, value, storages))
        if now:
            self._loop.perform(self._empty_outbox)
        else:
            self._loop.post(self._empty_outbox, wake=False)

    # -- as one who serves --------------------------------------------------------------------

    def serve(self, kind: int, handler: Handler, *, limited: bool = True) -> None:
        """Have requests of `kind` run by `handler`, in a thread of its own time; it answers then or later.

        limited: it runs a caller's function, so it is one of the num_worker_threads that may run at a time.
        """
        self._handlers[kind] = handler, limited

    def hear(self, kind: int, hearer: Hearer) -> None:
        """Have notices of `kind` taken by `hearer`, in the loop: it is quick and never blocks."""
        self.take(kind, lambda source, value, storages: hearer(source, value))

    def take(self, kind: int, taker: Taker) -> None:
        """The same for notices that come with memory."""
        self._takers[kind] = taker

    def submit(self, work: Callable[[], None], *, limited: bool = False) -> None:
        """Run `work` in a thread of its own time; shutdown waits for it. From any thread.

        limited: it runs a caller's function, so it is one of the num_worker_threads that may run at a time.
        """
        with self._lock:
            self._works += 1
        self._loop.thread_pool.submit(partial(self._work, work, limited), limited=limited)

    # -- in the loop --------------------------------------------------------------------------

    def _receive(self, source: int, what: int, rest: list[Any], storages: list[torch.Tensor]) -> None:
        if what >= STATUS_QUERY:
            self.parting.receive(source, what, rest)
            return
        self.received[source] += 1
        if what == REQUEST:
            number, kind, body, *note = rest
            request = Request(source, number, kind, Packed(body, storages, *note), time.monotonic(), self._respond)
            self.open[source, number] = request
            self._loop.thread_pool.submit(partial(self._serve, request), limited=self._handlers[kind][1])
            return
        if what == NOTICE:
            kind, value = rest
            self._takers[kind](source, value, storages)
            return
        call = self.pending.take(rest[0])
        if call is None:
            # It ended without this answer, by its time limit.
            if what == ANSWER:
                self.submit(partial(self.unwanted, rest[2], source, Packed(rest[1], storages, *rest[3:])))
            return
        error = None
        if what == ANSWER:
            call.reply = Packed(rest[1], storages, *rest[3:])
        elif what == FAILURE:
            call.failure = rest[1]
        else:
            error = RpcError(f"RPC has been shut down on {self.workers[source].name} (rank {source}).")
        self._finish(call, error)

    def _send_request(self, call: Call, number: int, packed: Packed) -> None:
        if self._ended is not None or call.rank in self._lost:
            if self.pending.take(number) is not None:
                self._finish(call, RpcError(self._ended) if self._ended else WorkerLostError(self._lost[call.rank]))
            return
        if call.timeout:
            deadline = time.monotonic() + call.timeout
            self.pending.limit(number, deadline)
            self._loop.due_at(deadline)
        message: tuple[Any, ...] = (REQUEST, number, call.kind, self._body_to(call.rank, packed))
        self._send(call.rank, message if packed.note is None else (*message, packed.note), packed.storages)

    def _body_to(self, rank: int, packed: Packed) -> Any:
        # What a worker sends to itself stays the object that it is.
        return packed.body if rank == self.rank else as_buffer(packed.body)

    def _send(self, rank: int, message: tuple[Any, ...], storages: list[torch.Tensor]) -> None:
        self.sent[rank] += 1
        self._switchboard.send(rank, (self.session, *message), storages)

    def _empty_outbox(self) -> None:
        while self._outbox:
            rank, kind, value, storages = self._outbox[0]
            if self._ended is None and rank not in self._lost:
                self._send(rank, (NOTICE, kind, value), storages)
            # Only now: what stands here keeps the session from being idle.
            self._outbox.popleft()
        self.parting.look()

    def _finish(self, call: Call, error: Exception | None) -> None:
        call.error = error
        call.done = True
        if call.then is None:
            self.parting.look()
        else:
            self.submit(partial(call.then, call))

    def _expire(self, now: float) -> float:
        for call in self.pending.take_expired(now):
            self._finish(call, self._timed_out(call))
        return self.pending.next_deadline()

    def _timed_out(self, call: Call) -> RuntimeError:
        return RpcError(
            f"RPC ran for more than set timeout ({call.timeout * 1000:.0f} ms) and will now be marked with an error: "
            f"no answer to {self.me.name} (rank {self.rank}) from {self.workers[call.rank].name} (rank {call.rank})."
        )

    def lose(self, errors: dict[int, str]) -> None:
        """Some workers are gone: calls to them fail, those in flight too. In the loop."""
        self._lost.update(errors)
        for rank, error in errors.items():
            for hook in self.when_lost:
                hook(rank, WorkerLostError(error))
        for call in self.pending.take_all(set(errors)):
            self._finish(call, WorkerLostError(errors[call.rank]))
        self.parting.look()

    # -- in a thread of its own time ------------------------------------------------------------

    def _serve(self, request: Request) -> None:
        if self._ended is not None:
            # It has waited for a thread until after the session; its caller has been told.
            return
        handler = self._handlers[request.kind][0]
        try:
            if request.packed.note is None:
                handler(request)
            else:
                with in_context(request.packed.context):
                    handler(request)
        except BaseException as error:
            request.fail(error)

    def _respond(self, request: Request, result: Packed | BaseException | Description) -> None:
        if isinstance(result, Packed):
            message: tuple[Any, ...] = (ANSWER, request.number, self._body_to(request.source, result), request.kind)
            if result.note is not None:
                message = (*message, result.note)
            storages = result.storages
        else:
            description = result if isinstance(result, Description) else describe_error(result, self.me)
            message, storages = (FAILURE, request.number, description), []

        def send() -> None:
            if self._ended is None and request.source not in self._lost:
                self._send(request.source, message, storages)
            del self.open[request.source, request.number]
            self.parting.look()

        if request.answers_last:
            self._loop.post(send, wake=False)
            if isinstance(result, Packed):
                self._note_leaving(result)
        else:
            self._loop.perform(send)

    def _note_leaving(self, packed: Packed) -> None:
        if packed.note is not None:
            autograd_hooks.autograd_hooks().left(packed.note)

    def _work(self, work: Callable[[], None], limited: bool) -> None:
        try:
            if not limited or self._ended is None:
                work()
        finally:
            with self._lock:
                self._works -= 1
            if self.parting.begun:
                self._loop.perform(self.parting.look)


class _Process:
    """Holds the agent of this process."""

    agent: Agent | None = None


def current_agent() -> Agent:
    """The agent of the running session. Raises: RuntimeError before init_rpc and after shutdown."""
    agent = _Process.agent
    if agent is None:
        raise RpcError("RPC has not been initialized. Call hvlike.rpc.init_rpc first.")
    return agent


def is_running() -> bool:
    """True between init_rpc and shutdown."""
    return _Process.agent is not None


def set_agent(agent: Agent | None) -> None:
    """Make `agent` the one of this process; None: there is none any more."""
    _Process.agent = agent
