"""The forward pass: a message whose tensors require grad leaves a send where it is packed, a recv where it is opened.

sender                                  receiver
x  <- edges of the send                 Receive function, grad_fn of the copies of x
                    (the same number of the message)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hvlike.autograd.distributed_context import DistributedContext, Recv, new_recv, new_send
from hvlike.autograd.receive_function import Receive

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
