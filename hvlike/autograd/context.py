"""What one worker knows of one context: its sends and recvs, the gradients of its leaves, the backwards that run.

A message whose tensors require grad leaves a send where it is packed and a recv where it is opened:

    sender                                  receiver
    x  <- edges of the send                 Receive function, grad_fn of the copies of x
                        (both have the number of the message)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from hvlike.autograd.local_graph import LocalGraph, Receive
from hvlike.rpc.wire.devices import ReadyEvents

if TYPE_CHECKING:
    from hvlike.autograd.engine import SegmentRecord


class Runner(Protocol):
    """What runs torch's engine over a part of the graph."""

    def ran(self, recv: Recv, grads: Sequence[Tensor | None]) -> None:
        """The engine has come to `recv`, with these gradients; in a thread of the engine: never blocks."""


class Backward(Protocol):
    """One backward, as the context tells it what happens meanwhile. From any thread, the loop too: never blocks."""

    def recorded(self, recv: Recv) -> None:
        """A message was opened after this backward had engaged: nothing that it runs leads there."""

    def withdrawn(self, message: int) -> None:
        """A message of this worker was dropped unopened: no gradient will come for it."""

    def released(self) -> None:
        """The context is gone."""


@dataclass(eq=False)
class Send:
    """A message of this worker whose tensors include some that require grad."""

    message: int
    rank: int
    """Who gets it."""
    about: str
    """The function that it calls or answers."""
    edges: list[GradientEdge]
    """Where the gradients of these tensors go: as the tensors were when the message was packed."""
    owners: list[object]
    """Keeps the nodes of the edges alive."""
    devices: Sequence[torch.device] = ()
    """Where these tensors are, and their gradients have to be; empty where all are on the CPU."""


@dataclass(eq=False)
class Recv:
    """A message to this worker, the same from the other side."""

    message: int
    rank: int
    """Who has sent it."""
    count: int
    """How many of its tensors require grad."""
    dummy: Tensor
    """A leaf without elements, the input of the Receive function: one for each message."""
    has_hooks: bool = False
    """The node of the function has got hooks, which the engine runs only where it runs the node."""
    run: Runner | None = None
    """What is running the engine now, where the function hands over the gradients; set under the context's lock."""


def new_send(message: int, rank: int, about: str, graded: Sequence[Tensor]) -> Send:
    """The send of a message that is packed now."""
    edges, owners = zip(*map(edge_of, graded), strict=True)
    devices = () if all(tensor.is_cpu for tensor in graded) else tuple(tensor.device for tensor in graded)
    return Send(message, rank, about, list(edges), list(owners), devices)


def new_recv(message: int, rank: int, count: int) -> Recv:
    """The recv of a message that is opened now."""
    return Recv(message, rank, count, torch.empty(0, device="cpu", requires_grad=True))


_PythonNode: Any = torch._C._FunctionBase
"""The class of the nodes that Python functions have."""


def edge_of(tensor: Tensor) -> tuple[GradientEdge, object]:
    """Where the gradient of a tensor goes, and what keeps the node there alive.

    torch's get_gradient_edge knows no sparse leaves, and its edges keep the nodes of Python functions alive only in
    late versions.
    """
    node = tensor.grad_fn
    if node is not None and not isinstance(node, _PythonNode):
        return GradientEdge(node, tensor.output_nr), node
    with torch.enable_grad():
        after: Any = (tensor.view_as(tensor) if tensor.layout is torch.strided else tensor.clone()).grad_fn
    return GradientEdge(after.next_functions[0][0] if node is None else node, tensor.output_nr), after


@dataclass(eq=False)
class DistributedContext:
    """One context on one worker."""

    id: int
    sends: dict[int, Send] = field(default_factory=dict)
    recvs: dict[int, Recv] = field(default_factory=dict)
    gradients: dict[Tensor, Tensor] = field(default_factory=dict)
    """Of the leaves of this worker, summed over all backwards; changed under `lock`."""
    marks: ReadyEvents | None = None
    """Where in the streams of GPUs the gradients are there."""
    reached: set[int] = field(default_factory=set)
    """The workers that this one has sent a message of the context to."""
    segments: Sequence[SegmentRecord] = ()
    """What the last backward has run here, in this order; for `draw`."""
    runs: dict[object, Backward] = field(default_factory=dict)
    """The backwards that go on here."""
    ahead: LocalGraph | None = None
    """What was looked through of the graph before a backward asks for it; at most what the sends lead to."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    """Held while torch's engine runs over a part of the graph. Never taken in the loop."""
    _books: threading.Lock = field(default_factory=threading.Lock)
    """Held for moments: sends, recvs and runs change together."""
    _unseen: list[Send] = field(default_factory=list)
    """The sends that nothing was looked through for."""

    def record_send(self, send: Send) -> None:
        """A message leaves. Backwards that have engaged before do not know of it."""
        with self._books:
            self.sends[send.message] = send
            self._unseen.append(send)

    def record_recv(self, recv: Recv) -> None:
        """A message was opened; backwards that have engaged before are told."""
        with self._books:
            self.recvs[recv.message] = recv
            runs = list(self.runs.values())
        for run in runs:
            run.recorded(recv)

    def look_ahead(self) -> None:
        """Look through the graph below what was sent, for the next backward; for threads with nothing else to do.

        Does nothing where another thread has the lock.
        """
        if not self.lock.acquire(blocking=False):
            return
        try:
            with self._books:
                sends, self._unseen = self._unseen, []
                starts = [edge.node for send in sends if send.message in self.sends for edge in send.edges]
                graph = self.ahead = self.ahead or LocalGraph(self.recvs)
            graph.reach(starts)
            graph.look_up_hooks()
        finally:
            self.lock.release()

    def engage(self, key: object, run: Backward) -> tuple[dict[int, Send], dict[int, Recv], LocalGraph | None]:
        """A backward begins: copies of what is recorded now, and what was looked through; with the lock held.

        It is told of each recv that follows.
        """
        with self._books:
            self.runs[key] = run
            ahead, self.ahead = self.ahead, None
            self._unseen.clear()
            return dict(self.sends), dict(self.recvs), ahead

    def disengage(self, key: object) -> None:
        """A backward has ended here, well or badly."""
        with self._books:
            self.runs.pop(key, None)

    def withdraw(self, message: int) -> None:
        """A message of this worker was dropped unopened: it has never been sent, as far as backwards go."""
        with self._books:
            known = self.sends.pop(message, None) is not None
            # It may lead to this send: a backward would wait for what never comes.
            self.ahead = None
            runs = list(self.runs.values())
        if known:
            for run in runs:
                run.withdrawn(message)

    def release(self) -> None:
        """The context is over: backwards that go on are told. What it holds goes when nobody refers to it any more."""
        with self._books:
            runs = list(self.runs.values())
        for run in runs:
            run.released()


_attach: Callable[[Tensor, Recv, Sequence[Tensor]], Sequence[Tensor]] = Receive.apply


def record_send(context: DistributedContext, message: int, rank: int, about: str, graded: Sequence[Tensor]) -> None:
    """Note a message that is packed for a worker. graded: its tensors that require grad."""
    context.record_send(new_send(message, rank, about, graded))


def record_recv(context: DistributedContext, message: int, rank: int, graded: Sequence[Tensor]) -> Sequence[Tensor]:
    """Note a message that is opened; return its tensors, attached to it.

    graded: leaves that require grad and that nobody has seen yet. Where grad mode is off they stay what they are, and
    no gradient ever comes to the message.
    """
    recv = new_recv(message, rank, len(graded))
    if graded and torch.is_grad_enabled():
        # A view as the output of a function of its own could not be changed in place.
        own = [tensor.detach().clone() if tensor._is_view() else tensor for tensor in graded]
        graded = attach(recv, own)
    context.record_recv(recv)
    return graded


def attach(recv: Recv, graded: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the tensors of a message with the Receive function as what they come from."""
    return _attach(recv.dummy, recv, graded)
