"""backward(), the backwards that this worker takes part in, and for each its queue of events and who handles them.

On the worker where backward() was called, its own thread handles the events and drives the loop while there are none.
On other workers a thread of RPC is taken for each burst of events. No thread waits for other workers.

A worker that has finished its part may still be asked about a message that was opened late. So a backward is
remembered, by its context, until its root has ended it: later backwards of that root in the same context say so.
"""

from __future__ import annotations

import logging
import operator
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pickle import PickleBuffer
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from hvlike.autograd.context import DistributedContext, Recv, new_ids, rank_of_id
from hvlike.autograd.contexts import MESSAGES_ROW, Backwards, contexts
from hvlike.autograd.engine import SegmentRecord
from hvlike.autograd.local_backward import LocalBackward, Roots
from hvlike.autograd.protocol import BackwardMessage, BackwardPhase, BackwardState, Mode
from hvlike.errors import RpcError, UsageError, WorkerLostError, WrongTypeError
from hvlike.observe.recorder import Recorder
from hvlike.rpc.agent.agent import Agent, current_agent
from hvlike.rpc.agent.profiling import TimelineRow
from hvlike.rpc.wire.autograd_hooks import NO_MESSAGE, unknown_context
from hvlike.rpc.wire.message import Packed, lost_ranks
from hvlike.rpc.wire.pickler import Incoming, Outgoing, pack, unpack
from hvlike.system.system import system

logger = logging.getLogger("hvlike")

_MODES = {mode.name.lower(): mode for mode in Mode}
BACKWARD_MESSAGE = 52  # The kind of these notices


class Heading(NamedTuple):
    """What every message says of its backward."""

    context: int
    number: int  # The id of the backward, made by its root
    oldest: int  # The number of the root's oldest backward in this context that runs
    mode: Mode
    retain_graph: bool


Wire = tuple[Any, ...]
"""The fields of a Heading, then those of a BackwardMessage, with the gradients as pickler.pack leaves them."""


def _encode(heading: Heading, message: BackwardMessage, rank: int) -> tuple[Wire, list[Tensor]]:
    body, storages, _ = pack(message.gradients, Outgoing(rank)) if message.gradients else Packed(b"", [])
    # A long body is sent out of band, without a copy into the pickle.
    gradients = PickleBuffer(body) if type(body) is bytearray else body
    run = gradients, message.asks, message.done
    rest = message.marks, message.acknowledged, message.error, message.lost, message.abort
    return (*heading[:3], int(heading.mode), heading.retain_graph, *run, *rest), storages


def _heading_of(wire: Wire) -> Heading:
    context, number, oldest, mode, retain_graph, *_ = wire
    return Heading(context, number, oldest, Mode(mode), retain_graph)


def _opens(wire: Wire) -> bool:
    """Whether the message concerns a worker that does not know its backward; see BackwardMessage.opens."""
    return bool(wire[6] or wire[8])


def _decode(wire: Wire, storages: list[Tensor], source: int) -> BackwardMessage:
    gradients, *rest = wire[5:]
    return BackwardMessage(unpack(Packed(gradients, storages), Incoming(source)) if gradients else {}, *rest)


class BackwardTable:
    """Takes the messages of the backwards of one session."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self._numbers = new_ids(agent.rank)
        self._lock = system.Lock()  # For what contexts know of backwards
        agent.hear(BACKWARD_MESSAGE, self._take)
        agent.when_lost.append(self._lose)

    def begin(self, context: DistributedContext, roots: Roots, mode: Mode, retain_graph: bool) -> BackwardPass:
        with self._lock:
            number = next(self._numbers)
            oldest = min((each for each in context.passes if rank_of_id(each) == self.agent.rank), default=number)
            heading = Heading(context.id, number, oldest, mode, retain_graph)
            begun = context.passes[number] = BackwardPass(self, context, heading, roots)
        return begun

    def forget(self, ended: BackwardPass) -> None:
        """Nothing more comes of a backward. From any thread."""
        ended.context.disengage(ended)
        with self._lock:
            ended.context.passes.pop(ended.heading.number, None)

    def end(self) -> None:
        for each in self._all():
            each.fail("RPC has been shut down while this was in flight.")

    def _take(self, source: int, wire: Wire, storages: list[Tensor]) -> None:
        context = contexts.get(wire[0])
        found = context.passes.get(wire[1]) if context is not None else None
        if found is None and _opens(wire):
            found = self._open(_heading_of(wire), source)
        if found is not None:
            found.receive(source, wire, storages)

    def _open(self, heading: Heading, source: int) -> BackwardPass | None:
        """Add a backward that is new to this worker. None where it is over."""
        root = rank_of_id(heading.number)
        if root == self.agent.rank:
            return None
        # The message that is to make the context known here may still wait for a thread.
        contexts.came((heading.context, NO_MESSAGE), source, ())
        context = contexts.get(heading.context)
        if context is None:
            answer = BackwardMessage(error=f"Error on Node {self.agent.rank}: {unknown_context(heading.context)}")
            self.agent.post(source, BACKWARD_MESSAGE, *_encode(heading, answer, source))
            return None
        with self._lock:
            if heading.number < context.oldest_passes.get(root, 0):
                return None
            context.oldest_passes[root] = heading.oldest
            passes = context.passes
            over = [passes[each] for each in passes if rank_of_id(each) == root and each < heading.oldest]
            opened = passes[heading.number] = BackwardPass(self, context, heading, ())
        for each in over:
            self.forget(each)
        return opened

    def _lose(self, rank: int, error: Exception) -> None:
        for each in self._all():
            each.lost(rank, str(error))

    def _all(self) -> list[BackwardPass]:
        with self._lock:
            return [each for context in contexts.all() for each in context.passes.values()]


class BackwardPass:
    """One backward on one worker. It is remembered until its root begins another one."""

    def __init__(self, table: BackwardTable, context: DistributedContext, heading: Heading, roots: Roots) -> None:
        """roots: empty where another worker is the root."""
        self.heading = heading
        self.context = context
        self.cause: BaseException | None = None  # At the root: what was raised on this worker and has ended it
        self._table = table
        self._agent = agent = table.agent
        recorder = agent.fabric.recorder
        self._trace = BackwardTrace(recorder, heading) if recorder.on else None
        machine = LocalBackward(
            context, roots, lambda *emitted: self.state.emit(*emitted), listener=self, retain_graph=heading.retain_graph
        )
        # None when the backward is over: the machine refers to a part of the graph.
        self._machine: LocalBackward | None = machine
        self.state = BackwardState(agent.rank, heading.mode, machine)
        self._events: deque[Callable[[], None]] = deque()
        self._lock = system.Lock()
        self._is_root = False
        self._has_thread = False  # A thread handles the events, or will

    def receive(self, source: int, wire: Wire, storages: list[Tensor]) -> None:
        self._put(partial(self._decode, source, wire, storages))

    def lost(self, rank: int, error: str) -> None:
        self._put(partial(self.state.lost, rank, error))

    def recorded(self, recv: Recv) -> None:
        """A message was opened after the backward had engaged: nothing that it runs leads there. From any thread."""
        self._put(partial(self.state.recorded, recv.id, recv.rank), wake_root=True)

    def withdrawn(self, send: int) -> None:
        self._put(partial(self.state.withdrawn, send), wake_root=True)

    def released(self) -> None:
        if not self.state.is_over:
            self.fail(f"Could not find autograd context with id: {self.heading.context}: it was released meanwhile")

    def fail(self, error: str) -> None:
        self._put(partial(self.state.fail, error), wake_root=True)

    def complete(self, seconds: float | None) -> None:
        """Be the root: begin, and block until the backward has ended, well or badly. seconds: None for no limit."""
        deadline = None if seconds is None else system.monotonic() + seconds
        self._is_root = self._has_thread = True
        self._events.append(self.state.begin)
        try:
            self._handle_events()
            while not self.state.is_over:
                remaining = None if deadline is None else deadline - system.monotonic()
                if not self._agent.fabric.loop.wait(lambda: bool(self._events), remaining):
                    self._events.append(partial(self.state.fail, self._describe_timeout(seconds)))
                self._handle_events()
        except BaseException as error:
            self._events.append(partial(self.state.fail, repr(error)))
            self._handle_events()
            raise
        finally:
            self._table.forget(self)

    def _describe_timeout(self, seconds: float | None) -> str:
        names = ", ".join(f"{self._agent.workers[rank].name} (rank {rank})" for rank in self.state.awaited)
        return (
            f"RPC ran for more than set timeout ({1000 * (seconds or 0.0):.0f} ms): this backward has had no answer "
            f"from {names or 'itself'}, or from a worker that is waited for there. The limit is that of RPC "
            "(rpc_timeout of init_rpc)."
        )

    def _put(self, event: Callable[[], None], *, wake_root: bool = False) -> None:
        with self._lock:
            self._events.append(event)
            if self._has_thread:
                if wake_root and self._is_root:
                    self._agent.fabric.loop.post(lambda: None)
                return
            self._has_thread = True
        self._agent.submit(self._handle_burst)

    def _handle_burst(self) -> None:
        while True:
            self._handle_events()
            with self._lock:
                if not self._events:
                    self._has_thread = False
                    return

    def _handle_events(self) -> None:
        """Handle all events that are there, run what can run then, and send the messages that follow."""
        state = self.state
        with self.context.lock:
            self._do(self._take_events)
            machine = self._machine
            if machine is not None and machine.has_to_reduce and not state.is_over:
                # That waits for other ranks. What they may wait for has been sent.
                self._do(machine.reduce)
            if state.is_over:
                self._machine = None
        if self._trace is not None and state.is_over:
            self._trace.end(state.error)
            self._trace = None

    def _take_events(self) -> None:
        while self._events:
            self._events.popleft()()

    def _do(self, work: Callable[[], None]) -> None:
        """Do it, and what can be done then; send the messages that follow."""
        try:
            work()
            self.state.advance()
        except BaseException as error:
            if self._is_root:
                self.cause = error
            else:
                logger.debug("rank %d: an error in a backward", self._agent.rank, exc_info=error)
            self.state.fail(str(error) or repr(error), lost_ranks(error))
        if self._trace is not None and self._machine is not None:
            self._trace.show_segments(self._machine.segments)
        while messages := self.state.take_messages():
            self._send(messages)
            # Messages to workers that are gone have not left.
            lost = self._agent.lost
            for rank in lost.keys() & messages.keys() if lost else ():
                self.state.lost(rank, lost[rank])

    def _send(self, messages: dict[int, BackwardMessage]) -> None:
        # A thread that is about to wait or to listen sends them without waking another one.
        now = self.state.is_over if self._is_root else bool(self._events)
        for rank, message in messages.items():
            if self._trace is not None:
                self._trace.show_gradients(message, to=rank)
            wire, storages = _encode(self.heading, message, rank)
            self._agent.post(rank, BACKWARD_MESSAGE, wire, storages, now=now)

    def _decode(self, source: int, wire: Wire, storages: list[Tensor]) -> None:
        message = _decode(wire, storages, source)
        if self._trace is not None:
            self._trace.show_gradients(message, source=source)
        self.state.receive(source, message)


class BackwardTrace:
    """One backward on one worker in the timeline.

    Rows "autograd backwards 1, 2 ..." show BACKWARD and in it each SEGMENT that runs. The row "autograd messages" shows
    GRADIENTS that leave or arrive, and each SEND of the forward pass.
    """

    def __init__(self, recorder: Recorder, heading: Heading) -> None:
        self._recorder = recorder
        self._context = heading.context
        self._row = TimelineRow(recorder, "autograd backwards")
        self._shown = 0
        mode = heading.mode.name.lower()
        self._row.begin("BACKWARD", {"context": heading.context, "number": heading.number, "mode": mode})

    def show_segments(self, segments: Sequence[SegmentRecord]) -> None:
        for segment in segments[self._shown :]:
            now, here = self._recorder.now, time.perf_counter_ns()
            about = {"kind": segment.kind, "nodes": segment.nodes, "leaves": segment.leaves}
            about |= {"gradients of": list(segment.sends), "gradients for": list(segment.recvs)}
            self._row.begin("SEGMENT", about, now - (here - segment.start))
            self._row.end(at=now - (here - segment.end))
        self._shown = len(segments)

    def show_gradients(self, message: BackwardMessage, *, to: int | None = None, source: int | None = None) -> None:
        """Gradients leave for a worker, or have come from one."""
        if message.gradients and self._recorder.on:
            where = {"to": to} if to is not None else {"from": source}
            about = {"context": self._context, "messages": list(message.gradients), **where}
            self._recorder.instant(self._recorder.row(MESSAGES_ROW), "GRADIENTS", about)

    def end(self, error: str | None) -> None:
        self._row.end({"error": error} if error is not None else None)
        self._row.leave()


def backward(context_id: int, roots: Sequence[Tensor], retain_graph: bool = False, mode: str = "safe") -> None:
    """Compute the gradients of all leaves that the roots depend on, on all workers, into the context.

    `get_gradients` returns the gradients; `.grad` is neither read nor written. Called on one worker, of any that the
    context has reached; several backwards may run at a time. Blocks until the gradients are final on all workers.

    Args:
        context_id: From `context`.
        roots: Tensors of one element each that require grad and are no leaves. Their gradients are summed.
        retain_graph: As in torch: without it the graph is freed, on all workers.
        mode: Which messages of the context take part:

            - "safe": All. Those that the roots do not depend on are told so. Best where most results are used.
            - "smart": Those that the roots depend on, found in a first phase. Best where many results are unused.
            - "fast": As torch's: every message has to be used, else a RuntimeError names the call.

    Raises:
        TypeError: For arguments of wrong types.
        UsageError: For an unknown mode.
        WorkerLostError: (a RuntimeError) A worker that takes part is gone; the text names it.
        RuntimeError: For tensors that cannot be roots; "Could not find autograd context with id"; "Error on Node
            <rank>: ..." for what fails in the graph, with one such prefix for each worker on the way to this one;
            after rpc_timeout seconds of RPC. The context can be used again.

    Example:
        >>> with autograd.context() as context_id:
        ...     loss = rpc.rpc_sync("worker1", torch.mul, (weight, x)).sum()
        ...     autograd.backward(context_id, [loss])
        ...     gradient = autograd.get_gradients(context_id)[weight]

    Source: torch.distributed.autograd.backward; the modes: "Distributed Autograd Design" in torch's notes.
    """
    number, tensors = _checked(context_id, roots, retain_graph)
    if mode not in _MODES:
        raise UsageError(f"backward: mode must be one of {', '.join(map(repr, _MODES))}, got {mode!r}.")
    agent = current_agent()
    context = contexts.find(number)
    edges = _edges(tensors)
    table: BackwardTable | None = contexts.backwards
    if table is None:
        raise RpcError("RPC has been shut down.")
    begun = table.begin(context, edges, _MODES[mode], bool(retain_graph))
    begun.complete(agent.timeout or None)
    if begun.state.phase is BackwardPhase.FAILED:
        cause, begun.cause = begun.cause, None
        try:
            if cause is not None and not isinstance(cause, Exception):
                raise cause
            if (lost := begun.state.lost_ranks) is not None:
                agent.told.update(lost)
                raise WorkerLostError(str(begun.state.error), lost) from cause
            raise RpcError(begun.state.error) from cause
        finally:
            # Its traceback leads here: a cycle would keep all tensors until the next garbage collection.
            del cause


def _checked(context_id: Any, roots: Any, retain_graph: Any) -> tuple[int, list[Tensor]]:
    """Return the arguments, if they are of the right types. Raises: TypeError."""
    wrong = ""
    tensors: list[Any] = []
    if isinstance(roots, Tensor | str) or not isinstance(roots, Iterable):
        wrong = f"roots={type(roots).__name__}"
    else:
        tensors = list(roots)
        others = [type(each).__name__ for each in tensors if not isinstance(each, Tensor)]
        wrong = f"a {others[0]} among the roots" if others else ""
    if isinstance(context_id, bool | float) or not hasattr(context_id, "__index__"):
        wrong = f"context_id={context_id!r}"
    if not isinstance(retain_graph, bool | int):
        wrong = f"retain_graph={retain_graph!r}"
    if wrong:
        raise WrongTypeError(
            "backward(): incompatible function arguments: it takes context_id, an int; roots, a sequence of tensors; "
            f"retain_graph, a bool; mode, a str. Got {wrong}."
        )
    return operator.index(context_id), tensors


def _edges(tensors: list[Tensor]) -> Roots:
    """Return where backward begins, and with what. Raises: RuntimeError for tensors that cannot be roots."""
    if not tensors:
        raise RpcError("No tensors provided for gradient computation.")
    edges = []
    for place, root in enumerate(tensors):
        node = root.grad_fn
        what = f"root {place} of backward (shape {list(root.shape)}, {root.dtype})"
        if not root.requires_grad:
            raise RpcError(f"requires_grad not set on {what}.")
        if root.numel() != 1:
            raise RpcError(f"{what} is not a scalar, all roots need to be scalar: sum it, or take its mean.")
        if node is None:
            raise RpcError(f"{what} does not have a valid gradient function: it is a leaf, nothing led to it.")
        edges.append((GradientEdge(node, root.output_nr), torch.ones_like(root)))
    return edges


Backwards.table = BackwardTable
Backwards.run = backward
