"""What workers run for the tests of backward."""

from __future__ import annotations

import threading
from typing import Any

import torch
from support.rpc.doors import pass_door
from torch import Tensor

from hvlike import autograd, rpc

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
    """Raises in backward where it is told to."""

    fails = True

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if Failing.fails:
            raise ValueError("Simulate error on backward pass")
        return gradient


def failing(value: Tensor) -> Tensor:
    result: Tensor = Failing.apply(value)
    return result


def let_fail(fails: bool) -> None:
    Failing.fails = fails


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
