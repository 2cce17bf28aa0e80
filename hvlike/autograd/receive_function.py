"""The autograd function that stands where the tensors of a message come from.

A backward of the context captures the gradients that come to it, and the engine does not run it: a Python function in
there takes 25 us, as much as all else that a small segment costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from hvlike.errors import RpcError

if TYPE_CHECKING:
    from hvlike.autograd.distributed_context import Recv

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
        return [GradientEdge(end_of(node), 0)]
    return [GradientEdge(node, number) for number in range(recv.count)]


def end_of(node: Node) -> Node:
    """The node of a recv's dummy: to capture its gradient has the engine run the recv's own node."""
    return _children(node)[0][0]


def recv_of(node: object) -> Recv | None:
    """The recv that a node of a graph stands for; None for all other nodes."""
    return node.recv if isinstance(node, _Node) else None
