"""One backward on one worker: its queue of events, the thread that handles them, and the local graph behind the
protocol.

On the worker where backward() was called, its own thread handles the events and drives the loop while there are none.
On other workers a thread of RPC is taken for each burst of events. No thread waits for other workers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Protocol

from torch import Tensor
from torch.autograd.graph import GradientEdge

from hvlike.autograd.context import Backward, DistributedContext, Recv, Send
from hvlike.autograd.engine import SegmentRecord
from hvlike.autograd.local_backward import LocalBackward
from hvlike.autograd.local_graph import LocalGraph
from hvlike.autograd.messages import BACKWARD_MESSAGE, Heading, Wire, decode, encode
from hvlike.autograd.protocol import BackwardMessage, BackwardState, Gradients, Phase
from hvlike.autograd.timeline import BackwardTrace
from hvlike.rpc.agent.agent import Agent
from hvlike.training.ddp.end_of_backward import Collected, collecting

Roots = Sequence[tuple[GradientEdge, Tensor]]
Emit = Callable[[int, int, Gradients | None], None]
"""A message that came here, its sender, the gradients of its tensors; as Part.emit."""


class LocalMachine:
    """See protocol.Machine. Every call with the context's lock held."""

    def __init__(
        self,
        context: DistributedContext,
        backward: Backward,
        heading: Heading,
        roots: Roots,
        emit: Emit,
        rank: int,
        ran: Callable[[Sequence[SegmentRecord]], None] | None,
    ) -> None:
        """backward: told of what happens in the context from the first call on. rank: of this worker.

        ran: told of the segments that have run, after each step.
        """
        self._context = context
        self._backward = backward
        self._heading = heading
        self._roots = roots
        self._emit = emit
        self._rank = rank
        self._ran = ran
        self._collected = Collected(context.gradients)
        """The data-parallel modules that the backward has come through."""
        self._sends: dict[int, Send] = {}
        self._recvs: dict[int, Recv] = {}
        self._graph: LocalGraph | None = None
        """Of SMART: what was marked so far."""
        self._ahead: LocalGraph | None = None
        """Of the other modes: what was looked through before."""
        self._local: LocalBackward | None = None

    @property
    def finished(self) -> bool:
        """Everything has run, and is reduced."""
        return self._local is not None and self._local.finished and not self._collected

    @property
    def is_unreduced(self) -> bool:
        """Everything has run, and some of it is to be reduced over other ranks."""
        return self._local is not None and self._local.finished and bool(self._collected)

    def reduce(self) -> None:
        """Reduce the gradients of data-parallel modules in the context. Blocks. Raises: what that raises."""
        self._collected.reduce()

    def reach(self, sends: Collection[int] | None) -> Mapping[int, int]:
        """Go on from some sends, or from the roots; return what is reached newly: messages that came, their senders."""
        if self._graph is None:
            self._look_up()
            self._ahead, self._graph = None, LocalGraph(self._recvs)
        if sends is None:
            edges = [edge for edge, _ in self._roots]
        else:
            edges = [edge for number in sends if number in self._sends for edge in self._sends[number].edges]
        return {recv.message: recv.rank for recv in self._graph.reach([edge.node for edge in edges])}

    def engage(self, sends: Collection[int] | None) -> Mapping[int, int]:
        """Begin the run; return what it waits for: messages that were sent from here, and to whom."""
        graph = self._graph
        if graph is None:
            self._look_up()
            recvs = self._recvs
        else:
            recvs = {recv.message: recv for recv in graph.recvs.values()}
        self._local = LocalBackward(
            self._sends,
            recvs,
            self._context.gradients,
            self._tell,
            retain_graph=self._heading.retain_graph,
            waits_for=sends,
            graph=self._ahead if graph is None else graph,
        )
        self._ahead = None
        self._context.segments = self._local.segments
        self._local.engage(self._roots)
        return {number: send.rank for number, send in self._sends.items() if sends is None or number in sends}

    def resolve(self, message: int, gradients: Gradients | None) -> None:
        """Take what has come for a message that was sent from here."""
        if self._local is not None:
            self._local.resolve(message, gradients)

    def step(self) -> None:
        """Run what can run. Raises: what the user's code raises."""
        if self._local is not None:
            with collecting(self._collected):
                self._local.step()
            if self._local.marks is not None:
                self._context.marks = self._local.marks
            if self._ran is not None:
                self._ran(self._local.segments)

    def let_go(self) -> None:
        """It is over. What is below holds this object: without this, all of it would wait for the garbage collector."""
        self._local = None

    def unused(self, message: int) -> str:
        """What to say in FAST of a message that was sent from here and that the backward does not lead to."""
        send = self._sends[message]
        what = send.about or "an RRef's value"
        return (
            f'mode="fast" needs every tensor that was sent in this context: of the call {what}, what rank {self._rank} '
            f"has sent to rank {send.rank} is not used by the roots of this backward. Use the result, leave the call "
            'out of the context, or pass mode="safe" or mode="smart".'
        )

    def _look_up(self) -> None:
        self._sends, self._recvs, self._ahead = self._context.engage(self._heading.number, self._backward)

    def _tell(self, recv: Recv, gradients: list[Tensor | None] | None) -> None:
        self._emit(recv.message, recv.rank, gradients)


logger = logging.getLogger("hvlike")

Event = Callable[[], None]


class Keeper(Protocol):
    """What remembers the runs of this worker."""

    agent: Agent

    def forget(self, run: BackwardPass) -> None:
        """Nothing more comes of it. From any thread."""

    def is_live(self, context: DistributedContext) -> bool:
        """Whether the context has not been released."""


class BackwardPass:
    """From the first letter, or the call of backward(), on; what it was is remembered until the root has begun anew."""

    def __init__(self, keeper: Keeper, context: DistributedContext, heading: Heading, roots: Roots) -> None:
        """roots: empty where it was not begun."""
        self.heading = heading
        self.context = context
        self.cause: BaseException | None = None
        """At the root: what was raised on this worker, where that was the end of it."""
        self._keeper = keeper
        self._agent = agent = keeper.agent
        recorder = agent.fabric.recorder
        self._observed = BackwardTrace(recorder, heading) if recorder.on else None
        ran = self._observed.ran if self._observed is not None else None
        machine = LocalMachine(context, self, heading, roots, self._emit, agent.rank, ran)
        self._machine: LocalMachine | None = machine
        """None when it is over: it holds a part of the graph."""
        self.part = BackwardState(agent.rank, heading.mode, machine)
        self._events: deque[Event] = deque()
        self._lock = threading.Lock()
        self._is_root = False
        self._is_taken = False
        """A thread takes the events, or will."""

    @property
    def is_over(self) -> bool:
        """It has ended on this worker."""
        return self.part.state is Phase.FINISHED or self.part.state is Phase.FAILED

    # -- events -------------------------------------------------------------------------------

    def hear(self, source: int, wire: Wire, storages: list[Tensor]) -> None:
        """A letter has come. In the loop."""
        self._put(partial(self._open, source, wire, storages))

    def lost(self, rank: int, error: str) -> None:
        """A worker is gone. In the loop."""
        self._put(partial(self.part.lost, rank, error))

    def recorded(self, recv: Recv) -> None:
        """A message was opened after the run had engaged. From any thread, like the following."""
        self._put(partial(self.part.recorded, recv.message, recv.rank), notify_if_sleeping=True)

    def withdrawn(self, message: int) -> None:
        """A message of this worker was dropped unopened."""
        self._put(partial(self.part.withdrawn, message), notify_if_sleeping=True)

    def released(self) -> None:
        """The context is gone."""
        if not self.is_over:
            self.fail(f"Could not find autograd context with id: {self.heading.context}: it was released meanwhile")
        self._keeper.forget(self)

    def fail(self, error: str) -> None:
        """Something outside of the backward ends it."""
        self._put(partial(self.part.fail, error), notify_if_sleeping=True)

    # -- in the thread of backward() --------------------------------------------------------------

    def complete(self, seconds: float | None) -> None:
        """Be the root: begin, and block until it has ended, well or badly. seconds: None for no limit."""
        deadline = None if seconds is None else time.monotonic() + seconds
        self._is_root = self._is_taken = True
        self._events.append(self.part.begin)
        try:
            self._turn()
            while not self.is_over:
                remaining = None if deadline is None else deadline - time.monotonic()
                if not self._agent.wait_until(lambda: bool(self._events), remaining):
                    self._events.append(partial(self.part.fail, self._overdue(seconds)))
                self._turn()
        except BaseException as error:
            self._events.append(partial(self.part.fail, repr(error)))
            self._turn()
            raise
        finally:
            self._keeper.forget(self)

    def _overdue(self, seconds: float | None) -> str:
        names = ", ".join(f"{self._agent.workers[rank].name} (rank {rank})" for rank in self.part.open)
        return (
            f"RPC ran for more than set timeout ({1000 * (seconds or 0.0):.0f} ms): this backward has had no answer "
            f"from {names or 'itself'}, or from a worker that is waited for there. The limit is that of RPC "
            "(rpc_timeout of init_rpc)."
        )

    # -- in whichever thread takes the events ----------------------------------------------------

    def _put(self, event: Event, *, notify_if_sleeping: bool = False) -> None:
        with self._lock:
            self._events.append(event)
            if self._is_taken:
                if notify_if_sleeping and self._is_root:
                    self._agent.fabric.loop.post(_no_op)
                return
            self._is_taken = True
        self._agent.submit(self._take_all)

    def _take_all(self) -> None:
        while True:
            self._turn()
            with self._lock:
                if not self._events:
                    self._is_taken = False
                    return

    def _turn(self) -> None:
        """Take all events that are there, run what can run then, and send what follows."""
        with self.context.lock:
            self._do(self._take_events)
            machine = self._machine
            if machine is not None and machine.is_unreduced and not self.is_over:
                # That waits for other ranks; what they may wait for has been sent.
                self._do(machine.reduce)
            if self.is_over and machine is not None:
                machine.let_go()
                self._machine = None
        if self._observed is not None and self.is_over:
            self._observed.ended(self.part.error)
            self._observed = None
        if self.part.state is Phase.FAILED and not self._keeper.is_live(self.context):
            self._keeper.forget(self)

    def _take_events(self) -> None:
        while self._events:
            self._events.popleft()()

    def _do(self, work: Callable[[], None]) -> None:
        """Do it, and what can be done then; send what follows."""
        try:
            work()
            self.part.advance()
        except BaseException as error:
            self._fail_by(error)
        letters = self.part.take_letters()
        while letters:
            self._send(letters)
            letters = self._letters_about_lost(letters)

    def _fail_by(self, error: BaseException) -> None:
        text = str(error) or repr(error)
        if self._is_root:
            self.cause = error
        else:
            logger.debug("rank %d: an error in a backward", self._agent.rank, exc_info=error)
        self.part.fail(text)

    def _send(self, letters: dict[int, BackwardMessage]) -> None:
        # Who is about to wait, or to listen again, sends them without waking anybody.
        now = self.is_over if self._is_root else bool(self._events)
        for rank, letter in letters.items():
            if self._observed is not None:
                self._observed.letter(letter, to=rank)
            wire, storages = encode(self.heading, letter, rank)
            self._agent.post(rank, BACKWARD_MESSAGE, wire, storages, now=now)

    def _letters_about_lost(self, written: dict[int, BackwardMessage]) -> dict[int, BackwardMessage]:
        """What is to be sent because some of these letters have not gone out: their receivers are gone."""
        gone = self._agent.lost
        for rank in gone.keys() & written.keys() if gone else ():
            self.part.lost(rank, gone[rank])
        return self.part.take_letters()

    def _open(self, source: int, wire: Wire, storages: list[Tensor]) -> None:
        letter = decode(wire, storages, source)
        if self._observed is not None:
            self._observed.letter(letter, source=source)
        self.part.hear(source, letter)

    def _emit(self, message: int, rank: int, gradients: Gradients | None) -> None:
        self.part.emit(message, rank, gradients)


def _no_op() -> None:
    """To have the loop turn once."""
