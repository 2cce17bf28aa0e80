"""Hooks of tensors that came in a message, and of the node that they come from: as of any other tensor and node."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.autograd.local_world import LocalWorld
from torch import Tensor


def sent_and_come(world: LocalWorld) -> tuple[Tensor, Any]:
    """A leaf of worker 1, and what has come of it at worker 0."""
    leaf = torch.ones(2, dtype=torch.float64, requires_grad=True)
    return leaf, world.carry_one(leaf * 1, 1, 0)


def gradient(world: LocalWorld, leaf: Tensor) -> list[float]:
    found: list[float] = world.workers[1].gradients[leaf].tolist()
    return found


def test_a_hook_of_the_tensor_sees_the_sum_once_and_changes_it() -> None:
    world, seen = LocalWorld(), []
    leaf, came = sent_and_come(world)

    def double(incoming: Tensor) -> Tensor:
        seen.append(incoming.tolist())
        return incoming * 2

    came.register_hook(double)
    world.backward([(came * 3 + came).sum()])
    assert seen == [[4.0, 4.0]]
    assert gradient(world, leaf) == [8.0, 8.0]


def test_the_tensor_retains_its_gradient() -> None:
    world = LocalWorld()
    leaf, came = sent_and_come(world)
    came.retain_grad()
    world.backward([(came * 3).sum()])
    assert came.grad.tolist() == gradient(world, leaf) == [3.0, 3.0]


def test_hooks_of_its_node_run_once_each_and_change_the_gradient() -> None:
    world, seen = LocalWorld(), []
    leaf, came = sent_and_come(world)

    def before(outer: tuple[Tensor]) -> tuple[Tensor]:
        seen.append(("before", outer[0].tolist()))
        return (outer[0] + 1,)

    def after(inner: object, outer: tuple[Tensor]) -> None:
        seen.append(("after", outer[0].tolist()))

    came.grad_fn.register_hook(after)
    came.grad_fn.register_prehook(before)
    world.backward([(came * 3).sum()])
    assert seen == [("before", [3.0, 3.0]), ("after", [4.0, 4.0])]
    assert gradient(world, leaf) == [4.0, 4.0]


def test_beside_others_without_hooks() -> None:
    world, calls = LocalWorld(), []
    leaf, watched = sent_and_come(world)
    other, came = sent_and_come(world)
    watched.grad_fn.register_hook(lambda inner, outer: calls.append(outer[0].tolist()))
    world.backward([(watched * 2 + came * 5).sum()])
    assert calls == [[2.0, 2.0]]
    assert (gradient(world, leaf), gradient(world, other)) == ([2.0, 2.0], [5.0, 5.0])


def test_the_graph_ends_there() -> None:
    _, came = sent_and_come(LocalWorld())
    assert came.grad_fn.next_functions == ()


@pytest.mark.parametrize("with_hooks", [False, True])
def test_what_came_in_another_context_is_refused(with_hooks: bool) -> None:
    _, came = sent_and_come(LocalWorld())
    if with_hooks:
        came.grad_fn.register_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match=r"This graph leads to tensors that rank 1 has sent\. Call hvlike"):
        LocalWorld().backward([(came * 2).sum()])
