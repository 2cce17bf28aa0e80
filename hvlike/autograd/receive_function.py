"""The autograd function that stands where the tensors of a message come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hvlike.errors import RpcError
from hvlike.rpc.devices.travelling import on_host

if TYPE_CHECKING:
    from hvlike.autograd.distributed_context import Recv

_Grads = tuple[Tensor | None, ...]


class Receive(torch.autograd.Function):
    """Outputs: the tensors of one message that require grad. Its only input that does is the message's own dummy.

    Its backward runs inside the engine of torch, and hands the gradients to the run that has called the engine.
    """

    @staticmethod
    def forward(ctx: Any, dummy: Tensor, recv: Recv, graded: Sequence[Tensor]) -> _Grads:
        """Attach the tensors, which stay the objects they are (a Parameter stays one)."""
        ctx.recv = recv
        ctx.set_materialize_grads(False)
        return tuple(graded)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, None]:
        """Raises: RuntimeError where this is not a backward of the context."""
        recv: Recv = ctx.recv
        if recv.run is None:
            raise RpcError(
                f"This graph leads to tensors that rank {recv.rank} has sent. Call hvlike.autograd.backward("
                "context_id, roots) instead of an ordinary backward: it goes on there."
            )
        # Those of a GPU travel as copies in host memory; here they are made in the stream that has the values.
        recv.run.ran(recv, [grad if grad is None or grad.is_cpu else on_host(grad) for grad in grads])
        return None, None, None


_Node: Any = vars(Receive)["_backward_cls"]
"""The class of its nodes."""


def recv_of(node: object) -> Recv | None:
    """The recv that a node of a graph stands for; None for all other nodes."""
    return node.recv if isinstance(node, _Node) else None
