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

if TYPE_CHECKING:
    from hvlike.autograd.context import Recv


_Grads = tuple[Tensor | None, ...]


class Receive(torch.autograd.Function):
    """Outputs: the tensors of one message that require grad. Its only input that does is the message's own dummy."""

    @staticmethod
    def forward(ctx: Any, dummy: Tensor, recv: Recv, graded: Sequence[Tensor]) -> _Grads:
        """Attach the tensors, which stay the objects they are (a Parameter stays one)."""
        ctx.recv = recv
        ctx.set_materialize_grads(False)
        return tuple(graded)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, None]:
        """Run where its node has hooks, to hand over what they make of the gradients.

        Raises: RuntimeError where this is not a backward of the context.
        """
        recv: Recv = ctx.recv
        if recv.run is None:
            raise RpcError(
                f"This graph leads to tensors that rank {recv.rank} has sent. Call hvlike.autograd.backward("
                "context_id, roots) instead of an ordinary backward: it goes on there."
            )
        recv.run.ran(recv, grads)
        return None, None, None


_Node: Any = vars(Receive)["_backward_cls"]
"""The class of its nodes."""

_children: Callable[[object], tuple[tuple[Node, int], ...]] = _Node.next_functions.__get__


def _noting(register: Callable[..., Any]) -> Callable[..., Any]:
    """The same, for a node of a recv that is to know of it."""

    def registered(node: Any, hook: Callable[..., Any]) -> Any:
        node.recv.has_hooks = True
        return register(node, hook)

    return registered


# A graph ends there, as at torch's own function for it; the dummy is nobody's business.
_Node.next_functions = ()
_Node.register_hook = _noting(_Node.register_hook)
_Node.register_prehook = _noting(_Node.register_prehook)


def captured_edges(node: Node, recv: Recv) -> list[GradientEdge]:
    """What torch's engine is to capture so that the gradients of a message are known after it, or handed over in it."""
    if recv.has_hooks:
        return [GradientEdge(dummy_node_of(node), 0)]
    return [GradientEdge(node, number) for number in range(recv.count)]


def dummy_node_of(node: Node) -> Node:
    """The node of a recv's dummy: to capture its gradient has the engine run the recv's own node."""
    return _children(node)[0][0]


def recv_of(node: object) -> Recv | None:
    """The recv that a node of a graph stands for; None for all other nodes."""
    return node.recv if isinstance(node, _Node) else None


class LocalGraph:
    """What was reached so far. Who uses it keeps the graph itself alive."""

    def __init__(self, recvs: Mapping[int, Recv]) -> None:
        """recvs: those that count, by message id."""
        # A node's Python object stays the same only while somebody holds it: the scan does.
        self.scan: Scan[Node] = Scan(attrgetter("next_functions"))
        self.leaves: dict[Node, Tensor] = {}
        """The leaves that were reached, by the nodes that would add to their .grad."""
        self.recvs: dict[Node, Recv] = {}
        """The recvs that were reached, by their nodes."""
        self._hooks: dict[Node, tuple[Hooks, Hooks]] = {}
        """Of the nodes of leaves, where they were looked up."""
        self._counted = recvs

    def reach(self, nodes: Iterable[Node]) -> list[Recv]:
        """Go on from these nodes; return the recvs that were not reached before."""
        found = []
        for end in self.scan.reach(nodes):
            recv = recv_of(end)
            if recv is None:
                if (leaf := getattr(end, "variable", None)) is not None:
                    self.leaves[end] = leaf
            elif self._counted.get(recv.message) is recv:
                self.recvs[end] = recv
                found.append(recv)
            else:
                # Of another context: its function says so when it is run.
                self.leaves[dummy_node_of(end)] = recv.dummy
        return found

    def look_up_hooks(self) -> None:
        """Do what `hooks` would do for the leaves that were reached: each takes as long as storing a gradient."""
        for node in self.leaves:
            if node not in self._hooks:
                self._hooks[node] = hooks_of(node)

    def hooks(self, node: Node) -> tuple[Hooks, Hooks]:
        """The hooks of a leaf's node."""
        return self._hooks.get(node) or hooks_of(node)

    def forget(self) -> None:
        """Keep nothing of the graph."""
        for kept in (self.scan.edges, self.scan.waits, self.leaves, self.recvs, self._hooks):
            kept.clear()
