"""One backward on one worker: its queue of events, and the thread that handles them.

On the worker where backward() was called, its own thread handles the events and drives the loop while there are none.
On other workers a thread of RPC is taken for each burst of events. No thread waits for other workers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from hvlike.autograd.context import DistributedContext, Recv
from hvlike.autograd.contexts import MESSAGES_ROW, contexts
from hvlike.autograd.engine import SegmentRecord
from hvlike.autograd.local_backward import LocalBackward, Roots
from hvlike.autograd.messages import BACKWARD_MESSAGE, Heading, Wire, decode, encode
from hvlike.autograd.protocol import BackwardMessage, BackwardState, Phase
from hvlike.observe.recorder import Recorder
from hvlike.rpc.agent.profiling import TimelineRow

if TYPE_CHECKING:
    from hvlike.autograd.backward import BackwardTable

logger = logging.getLogger("hvlike")


class BackwardPass:
    """One backward on one worker, a ContextListener. It is remembered until its root begins another one."""

    def __init__(self, table: BackwardTable, context: DistributedContext, heading: Heading, roots: Roots) -> None:
        """roots: empty where another worker is the root."""
        self.heading = heading
        self.context = context
        self.cause: BaseException | None = None
        """At the root: what was raised on this worker, where that has ended the backward."""
        self._table = table
        self._agent = agent = table.agent
        recorder = agent.fabric.recorder
        self._trace = BackwardTrace(recorder, heading) if recorder.on else None
        machine = LocalBackward(
            context,
            roots,
            lambda *emitted: self.state.emit(*emitted),
            listener=self,
            retain_graph=heading.retain_graph,
        )
        self._machine: LocalBackward | None = machine
        """None when the backward is over: the machine refers to a part of the graph."""
        self.state = BackwardState(agent.rank, heading.mode, machine)
        self._events: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._is_root = False
        self._has_thread = False
        """A thread handles the events, or will."""

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
        self._table.forget(self)

    def fail(self, error: str) -> None:
        """Something outside of the backward ends it."""
        self._put(partial(self.state.fail, error), wake_root=True)

    def complete(self, seconds: float | None) -> None:
        """Be the root: begin, and block until the backward has ended, well or badly. seconds: None for no limit."""
        deadline = None if seconds is None else time.monotonic() + seconds
        self._is_root = self._has_thread = True
        self._events.append(self.state.begin)
        try:
            self._handle_events()
            while not self.state.is_over:
                remaining = None if deadline is None else deadline - time.monotonic()
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
        if state.phase is Phase.FAILED and contexts.get(self.context.id) is not self.context:
            self._table.forget(self)

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
            self.state.fail(str(error) or repr(error))
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
            wire, storages = encode(self.heading, message, rank)
            self._agent.post(rank, BACKWARD_MESSAGE, wire, storages, now=now)

    def _decode(self, source: int, wire: Wire, storages: list[Tensor]) -> None:
        message = decode(wire, storages, source)
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
