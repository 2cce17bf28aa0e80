"""What one worker knows of one context: its sends and recvs, the gradients of its leaves, the backwards that run.

A message whose tensors require grad leaves a send where it is packed and a recv where it is opened:

    sender                                  receiver
    x  <- edges of the send                 Receive function, grad_fn of the copies of x
                        (both have the id of the message)

Contexts, messages and backwards have ids that are unique in a session: the rank that made them and a counter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from hvlike.autograd.local_graph import LocalGraph, Receive
from hvlike.rpc.wire.devices import NO_EVENTS, ReadyEvents
from hvlike.system.system import system

if TYPE_CHECKING:
    from hvlike.autograd.backward import BackwardPass
    from hvlike.autograd.engine import SegmentRecord

_PythonNode: Any = torch._C._FunctionBase
_attach: Callable[[Tensor, Recv, Sequence[Tensor]], Sequence[Tensor]] = Receive.apply


_COUNTER_BITS = 48  # Of an id; the rank is above them


def new_ids(rank: int, first: int = 0) -> Iterator[int]:
    """Return the ids of one worker, in ascending order. From any thread."""
    return count((rank << _COUNTER_BITS) + first)


def rank_of_id(identifier: int) -> int:
    return identifier >> _COUNTER_BITS


def id_in_words(identifier: int) -> str:
    """Return the rank that made this id, and its number there."""
    return f"{rank_of_id(identifier)}.{identifier % (1 << _COUNTER_BITS)}"


@dataclass(eq=False)
class Send:
    """A message of this worker whose tensors include some that require grad."""

    id: int
    rank: int  # The receiver
    about: str  # The function that the message calls or answers
    edges: list[GradientEdge]  # Where the gradients of the tensors go: as these were when the message was packed
    owners: list[object]  # Keeps the nodes of the edges alive
    devices: Sequence[torch.device] = ()  # Of the tensors and their gradients. Empty where all are on the CPU.


@dataclass(eq=False)
class Recv:
    """The same message at its receiver."""

    id: int
    rank: int  # The sender
    count: int  # The number of its tensors that require grad
    dummy: Tensor  # A leaf without elements, the input of the Receive function; every message has its own
    has_hooks: bool = False  # The node of the function has hooks, which the engine runs only where it runs the node
    deliver: Callable[[Recv, Sequence[Tensor | None]], None] | None = None
    """Takes the gradients from the function while the engine runs. Set under the context's lock."""


def new_send(message: int, rank: int, about: str, tensors: Sequence[Tensor]) -> Send:
    """The send of a message that is packed now. tensors: those that require grad."""
    edges, owners = zip(*map(_edge_of, tensors), strict=True)
    devices = () if all(tensor.is_cpu for tensor in tensors) else tuple(tensor.device for tensor in tensors)
    return Send(message, rank, about, list(edges), list(owners), devices)


def _edge_of(tensor: Tensor) -> tuple[GradientEdge, object]:
    """Return where the gradient of a tensor goes, and what keeps that node alive.

    torch's get_gradient_edge does not work for sparse leaves, and its edges keep the nodes of Python functions alive
    only in late versions.
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
    gradients_ready: ReadyEvents = NO_EVENTS  # When the gradients that are on GPUs are there
    reached: set[int] = field(default_factory=set)  # The workers that this one has sent a message of the context to
    segments: Sequence[SegmentRecord] = ()  # What the last backward has run on this worker, in this order; for `draw`
    lock: threading.RLock = field(default_factory=lambda: system.RLock())
    """Held while torch's engine runs over a part of the graph. Never taken in the loop."""
    passes: dict[int, BackwardPass] = field(default_factory=dict)  # The backwards that this worker knows, by number
    backwards: list[BackwardPass] = field(default_factory=list)
    """Those of them that have engaged. They are told what happens then, from any thread, the loop too."""
    oldest_passes: dict[int, int] = field(default_factory=dict)  # By root: its backwards with lower numbers are over
    ahead: LocalGraph | None = None
    """What was scanned of the graph before a backward asks for it; at most what the sends lead to."""
    _unscanned: list[Send] = field(default_factory=list)
    # For sends, recvs, backwards, what was scanned.
    _records: threading.Lock = field(default_factory=lambda: system.Lock())

    def record_send(self, send: Send) -> None:
        with self._records:
            self.sends[send.id] = send
            self._unscanned.append(send)

    def record_recv(self, message: int, rank: int, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Note a message that is opened, tell backwards that have engaged before, and return its tensors attached.

        tensors: leaves that require grad and that nobody has seen yet. Where grad mode is off they stay what they are,
        and no gradient ever comes to the message.
        """
        recv = Recv(message, rank, len(tensors), torch.empty(0, device="cpu", requires_grad=True))
        if tensors and torch.is_grad_enabled():
            # A view as the output of a function of its own could not be changed in place.
            own = [tensor.detach().clone() if tensor._is_view() else tensor for tensor in tensors]
            tensors = _attach(recv.dummy, recv, own)
        with self._records:
            self.recvs[message] = recv
            backwards = list(self.backwards)
        for backward in backwards:
            backward.recorded(recv)
        return tensors

    def scan_ahead(self) -> None:
        """Scan the graph below what was sent, for the next backward, unless another thread has the lock."""
        if not self.lock.acquire(blocking=False):
            return
        try:
            with self._records:
                sends, self._unscanned = self._unscanned, []
                starts = [edge.node for send in sends if send.id in self.sends for edge in send.edges]
                graph = self.ahead = self.ahead or LocalGraph(self.recvs)
            graph.reach(starts)
            graph.look_up_hooks()
        finally:
            self.lock.release()

    def engage(self, backward: BackwardPass) -> tuple[dict[int, Send], dict[int, Recv], LocalGraph | None]:
        """A backward begins. Returns copies of what is recorded now, and what was scanned. With the lock held.

        The backward is told of everything that is recorded later.
        """
        with self._records:
            self.backwards.append(backward)
            ahead, self.ahead = self.ahead, None
            self._unscanned.clear()
            return dict(self.sends), dict(self.recvs), ahead

    def disengage(self, backward: BackwardPass) -> None:
        with self._records:
            if backward in self.backwards:
                self.backwards.remove(backward)

    def withdraw(self, message: int) -> None:
        """Forget a send: its message was dropped unopened."""
        with self._records:
            is_known = self.sends.pop(message, None) is not None
            # It may lead to this send: a backward would wait for what never comes.
            self.ahead = None
            backwards = list(self.backwards)
        if is_known:
            for backward in backwards:
                backward.withdrawn(message)

    def release(self) -> None:
        """The context is over: tell backwards that run. What it holds is freed with the last reference to it."""
        with self._records:
            backwards, self.backwards = self.backwards, []
        for backward in backwards:
            backward.released()
        self.passes.clear()
