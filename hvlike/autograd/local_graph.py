"""The local graph: from roots and sent tensors down to leaves, and to the Receive functions of other workers' tensors.

A backward captures the gradients that come to a Receive function, and the engine does not run it: a Python function
there takes 25 us, as much as everything else that a small segment costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from hvlike.autograd.accumulate_grad import Hooks, hooks_of
from hvlike.autograd.graph import Scan
from hvlike.errors import RpcError
from hvlike.untraced import untraced

if TYPE_CHECKING:
    from hvlike.autograd.context import Recv


_Grads = tuple[Tensor | None, ...]


@untraced
class Receive(torch.autograd.Function):
    """The function whose outputs are the tensors of one message that require grad.

    Its only input that requires grad is the message's dummy.
    """

    @staticmethod
    def forward(ctx: Any, dummy: Tensor, recv: Recv, graded: Sequence[Tensor]) -> _Grads:
        """Attach the tensors, which stay the same objects (a Parameter stays one)."""
        ctx.recv = recv
        ctx.set_materialize_grads(False)
        return tuple(graded)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, None]:
        """Runs only where its node has hooks, to deliver the gradients that they return.

        Raises: RuntimeError where this is not a backward of the context.
        """
        recv: Recv = ctx.recv
        if recv.deliver is None:
            raise RpcError(
                f"This graph leads to tensors that rank {recv.rank} has sent. Call hvlike.autograd.backward("
                "context_id, roots) instead of an ordinary backward: it goes on there."
            )
        recv.deliver(recv, grads)
        return None, None, None


_ReceiveNode: Any = vars(Receive)["_backward_cls"]
_children: Callable[[object], tuple[tuple[Node, int], ...]] = _ReceiveNode.next_functions.__get__


def _noting(register: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same method, which notes at the recv that its node has hooks."""

    def registered(node: Any, hook: Callable[..., Any]) -> Any:
        node.recv.has_hooks = True
        return register(node, hook)

    return registered


# A graph ends there, as at torch's own function for it, and does not show the dummy.
_ReceiveNode.next_functions = ()
_ReceiveNode.register_hook = _noting(_ReceiveNode.register_hook)
_ReceiveNode.register_prehook = _noting(_ReceiveNode.register_prehook)


def captured_edges(node: Node, recv: Recv) -> list[GradientEdge]:
    """Return what the engine captures so that the gradients of a message are there after it, or delivered in it."""
    if recv.has_hooks:
        return [GradientEdge(dummy_node_of(node), 0)]
    return [GradientEdge(node, number) for number in range(recv.count)]


def dummy_node_of(node: Node) -> Node:
    """Return the node of a recv's dummy. To capture its gradient makes the engine run the recv's own node."""
    return _children(node)[0][0]


def recv_of(node: object) -> Recv | None:
    """Return the recv that a node of a graph stands for, None for all other nodes."""
    return node.recv if isinstance(node, _ReceiveNode) else None


class LocalGraph:
    """The part of the graph that was reached so far. The caller keeps the graph itself alive."""

    def __init__(self, recvs: Mapping[int, Recv]) -> None:
        # A node's Python object stays the same only while it is referred to: the scan does so.
        self.scan: Scan[Node] = Scan(attrgetter("next_functions"))
        self.leaves: dict[Node, Tensor] = {}  # The leaves that were reached, by the nodes that would add to their .grad
        self.recvs: dict[Node, Recv] = {}  # The recvs that were reached, by their nodes
        self._hooks: dict[Node, tuple[Hooks, Hooks]] = {}  # Of the nodes of leaves, where they were looked up
        self._of_context = recvs

    def reach(self, nodes: Iterable[Node]) -> list[Recv]:
        """Go on from these nodes and return the recvs that were not reached before."""
        found = []
        for end in self.scan.reach(nodes):
            recv = recv_of(end)
            if recv is None:
                if (leaf := getattr(end, "variable", None)) is not None:
                    self.leaves[end] = leaf
            elif self._of_context.get(recv.id) is recv:
                self.recvs[end] = recv
                found.append(recv)
            else:
                # It belongs to another context: its function raises when it is run.
                self.leaves[dummy_node_of(end)] = recv.dummy
        return found

    def look_up_hooks(self) -> None:
        """Look up in advance what `hooks` returns: for one leaf that takes as long as storing a gradient."""
        for node in self.leaves:
            if node not in self._hooks:
                self._hooks[node] = hooks_of(node)

    def hooks(self, node: Node) -> tuple[Hooks, Hooks]:
        return self._hooks.get(node) or hooks_of(node)

    def forget(self) -> None:
        for kept in (self.scan.edges, self.scan.waits, self.leaves, self.recvs, self._hooks):
            kept.clear()
