"""The local graph of a context as the protocol of a backward sees it: messages by their numbers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from torch import Tensor
from torch.autograd.graph import GradientEdge

from hvlike.autograd.distributed_context import Backward, DistributedContext, Recv, Send
from hvlike.autograd.letter import Gradients
from hvlike.autograd.local_backward import LocalBackward
from hvlike.autograd.local_graph import LocalGraph
from hvlike.autograd.messages import Heading
from hvlike.autograd.segment import Segment
from hvlike.training.ddp.collecting import Collected, collecting

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
        ran: Callable[[Sequence[Segment]], None] | None,
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
