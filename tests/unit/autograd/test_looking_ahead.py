"""While a worker waits it looks through its graph: what the next backward does is the same with and without it."""

from __future__ import annotations

import threading
from typing import Any

import torch
from support.autograd.local_world import Listener
from torch import Tensor

from hvlike.autograd.context import DistributedContext, new_send
from hvlike.autograd.local_backward import LocalBackward

Emitted = dict[int, "list[list[float] | None] | None"]


def leaf_of(value: float) -> Tensor:
    return torch.full((2,), value, requires_grad=True)


def received(context: DistributedContext, message: int) -> Tensor:
    return context.record_recv(message, 1, [leaf_of(1.0)])[0]


def send(context: DistributedContext, message: int, tensor: Tensor) -> None:
    context.record_send(new_send(message, 1, "test", [tensor]))


def backward(context: DistributedContext, answers: dict[int, float]) -> Emitted:
    """One that was begun elsewhere: all sends are answered, those that are not here are not waited for."""
    emitted: Emitted = {}

    def emit(recv: int, rank: int, gradients: Any) -> None:
        emitted[recv] = gradients and [each if each is None else each.tolist() for each in gradients]

    with context.lock:
        local = LocalBackward(context, [], emit, listener=Listener())
        for message in local.engage(None):
            local.resolve(message, [torch.full((2,), answers[message])])
            local.step()
    assert local.finished
    return emitted


def test_the_next_backward_of_the_context_has_all_sends() -> None:
    context, leaf = DistributedContext(1), leaf_of(2.0)
    # Additions keep nothing that the first backward would free.
    shared = leaf + 1
    send(context, 1, shared + 0)
    context.scan_ahead()
    backward(context, {1: 1.0})
    send(context, 2, shared + 1)
    context.scan_ahead()
    backward(context, {1: 10.0, 2: 100.0})
    assert context.gradients[leaf].tolist() == [111.0, 111.0]


def test_what_was_withdrawn_is_not_waited_for() -> None:
    context, leaf = DistributedContext(1), leaf_of(2.0)
    came = received(context, 1)
    below = came * leaf
    send(context, 2, below * 1)
    send(context, 3, below * 5)
    context.scan_ahead()
    context.withdraw(3)
    send(context, 4, leaf * 7)
    context.scan_ahead()
    emitted: list[int] = []
    with context.lock:
        local = LocalBackward(context, [], lambda recv, rank, gradients: emitted.append(recv), listener=Listener())
        local.engage(None)
        local.resolve(2, [torch.ones(2)])
        local.step()
    # While the gradient of the other send is missing: nothing of what was withdrawn is in the way.
    assert emitted == [1]


def test_a_hook_that_is_registered_afterwards_runs() -> None:
    context, leaf = DistributedContext(1), leaf_of(2.0)
    product: Any = leaf * 3
    send(context, 1, product)
    context.scan_ahead()
    node = product.grad_fn.next_functions[0][0]
    seen: list[list[float]] = []
    node.register_hook(lambda inner, outer: seen.append(outer[0].tolist()))
    backward(context, {1: 1.0})
    assert seen == [[3.0, 3.0]]


def test_nobody_is_waited_for() -> None:
    context = DistributedContext(1)
    send(context, 1, leaf_of(2.0) * 3)
    with context.lock:
        other = threading.Thread(target=context.scan_ahead)
        other.start()
        other.join()
        assert context.ahead is None
    context.scan_ahead()
    assert context.ahead is not None
