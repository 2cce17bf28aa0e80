"""What tests ask other workers about contexts, and have them run for backward."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from support.rpc.doors import pass_door, passes
from torch import Tensor

import hvlike.rpc
from hvlike import autograd, rpc
from hvlike.autograd.contexts import contexts
from hvlike.autograd.local_graph import recv_of
from hvlike.rpc.agent.agent import current_agent as agent
from hvlike.rpc.functions import async_execution
from hvlike.rpc.wire.autograd_hooks import this_thread


def here() -> int:
    """The context of the thread that runs this."""
    return this_thread.context


def is_known(context: int) -> bool:
    """Whether this worker has the context."""
    return context in contexts.live()


def sends(context: int) -> dict[int, tuple[int, int]]:
    """What was sent from here in a context: to whom and with how many tensors that require grad, by message."""
    return {number: (send.rank, len(send.edges)) for number, send in contexts.find(context).sends.items()}


def recvs(context: int) -> dict[int, tuple[int, int]]:
    """What has come here in a context: from whom and with how many tensors that require grad, by message."""
    return {number: (recv.rank, recv.count) for number, recv in contexts.find(context).recvs.items()}


def here_and_there(to: int) -> tuple[int, int]:
    """The context here, and that of a call from here to another worker."""
    return this_thread.context, hvlike.rpc.rpc_sync(to, here)


def is_answered(door: str, source: int) -> bool:
    """Whether somebody has gone through the door on this worker, and the answer to rank `source` has been sent."""
    waiting = [request for request in agent().open.values() if request.source == source]
    return passes(door) == 1 and pass_door.__qualname__ not in [request.about for request in waiting]


def answers(context: int, request: int) -> list[int]:
    """The messages of a context by which this worker has answered calls of `pass_door`, the request's own left out."""
    found = contexts.find(context).sends.values()
    return [send.id for send in found if send.about == pass_door.__qualname__ and send.id != request]


@async_execution
def here_and_later(to: int) -> Any:
    """The context here, that of a call, and that of the call's callback here, where another call is made."""
    first = this_thread.context
    return hvlike.rpc.rpc_async(to, here).then(
        lambda future: (first, future.wait(), this_thread.context, hvlike.rpc.rpc_sync(to, here))
    )


def is_attached(tensor: torch.Tensor) -> bool:
    """Whether a tensor is what a message has brought in a context."""
    return recv_of(tensor.grad_fn) is not None


def in_another_thread(function: Callable[[], Any]) -> Any:
    """What the function returns in a thread of its own."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


_lock = threading.Lock()
_weights: dict[str, Tensor] = {}


def weight(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The leaf of this name on this worker, the same at every call: 1, 2, 3 and so on in it."""
    with _lock:
        if name not in _weights:
            count = torch.Size(shape).numel()
            _weights[name] = torch.arange(1, count + 1, dtype=dtype).reshape(shape).requires_grad_()
        return _weights[name]


def times_weight(name: str, value: Tensor) -> Tensor:
    """Multiply by a weight of this worker that has the shape of the value."""
    return value * weight(name, *value.shape, dtype=value.dtype)


def gradient_of_weight(context: int, name: str) -> Tensor | None:
    """What backward has left for a weight of this worker."""
    return autograd.get_gradients(context).get(_weights[name])


def twice(value: Tensor) -> Tensor:
    return value * 2


def square(value: Tensor) -> Tensor:
    return value * value


def parts(value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three results that require grad, one of them of several outputs of one function."""
    first, second = (value * 3).split(1)
    return first, second, value * 5


def nothing(value: Tensor) -> None:
    """Takes a tensor, returns none."""


def call_on(ranks: list[int], function: Any, *args: Any) -> Any:
    """Go through these workers, one calling the next, and run the function on the last."""
    if not ranks:
        return function(*args)
    return rpc.rpc_sync(ranks[0], call_on, (ranks[1:], function, *args))


class Failing(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("Simulate error on backward pass")


def failing(value: Tensor) -> Tensor:
    result: Tensor = Failing.apply(value)
    return result


class Waiting(torch.autograd.Function):
    """Waits at a door in backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, door: str) -> Tensor:
        ctx.door = door
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        pass_door(ctx.door)
        return gradient, None


def waiting(value: Tensor, door: str) -> Tensor:
    result: Tensor = Waiting.apply(value, door)
    return result
