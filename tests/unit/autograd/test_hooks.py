"""Hooks of the nodes of leaves, and of those of tensors that came in a message: each once, with the complete gradient.

Hooks of tensors, and gradients that they retain, are in the random programs of test_boundary.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.autograd.local_world import LocalWorld
from torch import Tensor

from hvlike.autograd.accumulate_grad import hooks_of


def leaf_of(value: float) -> Tensor:
    return torch.full((2,), value, dtype=torch.float64, requires_grad=True)


def node_of(leaf: Tensor) -> Any:
    """The node that would add to .grad; lives as long as somebody refers to it."""
    function: Any = leaf.expand_as(leaf).grad_fn
    return function.next_functions[0][0]


def used_early_and_late(world: LocalWorld, leaf: Tensor) -> Tensor:
    """A part of the leaf's gradient (7) is there at once, the other (3) when another worker has answered."""
    sent = leaf * 3
    back = world.carry_one(world.carry_one(sent, 0, 1) * 1, 1, 0)
    return (back + leaf * 7).sum()


def test_hooks_of_its_node_run_once_around_the_accumulation() -> None:
    world, leaf = LocalWorld(), leaf_of(1.0)
    node, seen = node_of(leaf), list[Any]()
    gradients = world.workers[0].gradients

    def before(outer: tuple[Tensor]) -> tuple[Tensor]:
        seen.append(("before", outer[0].tolist(), leaf in gradients))
        return (outer[0] + 1,)

    def after(inner: tuple[()], outer: tuple[Tensor]) -> None:
        seen.append(("after", inner, outer[0].tolist(), gradients[leaf].tolist()))

    node.register_hook(after)
    node.register_prehook(before)
    node.register_hook(after)
    world.backward([used_early_and_late(world, leaf)])
    assert seen == [
        ("before", [10.0] * 2, False),
        ("after", (), [11.0] * 2, [11.0] * 2),
        ("after", (), [11.0] * 2, [11.0] * 2),
    ]
    assert leaf.grad is None


def test_they_see_what_hooks_in_an_ordinary_backward_see() -> None:
    calls: list[Any] = []

    def watch(leaf: Tensor, name: str) -> Any:
        node, register = node_of(leaf), leaf.register_hook
        hook: Any = register
        hook(lambda gradient: calls.append((name, "leaf", gradient.tolist())))
        node.register_prehook(lambda *inputs: calls.append((name, "before", repr(inputs))))
        node.register_hook(lambda *inputs: calls.append((name, "after", repr(inputs))))
        return node

    leaf = leaf_of(1.0)
    kept = watch(leaf, "leaf")
    torch.autograd.backward((leaf * leaf).sum())
    expected, calls[:] = list(calls), []
    world = LocalWorld()
    world.backward([(leaf * leaf).sum()])
    assert calls == expected
    assert kept is node_of(leaf)


def test_a_node_that_several_edges_lead_to_runs_its_hooks_once() -> None:
    world, leaf, calls = LocalWorld(), leaf_of(1.0), []
    root: Any = (leaf * leaf).sum()
    product = root.grad_fn.next_functions[0][0]
    for place in (0, 1, 1):
        product.next_functions[place][0].register_hook(lambda *_: calls.append(1))
    for times in (1, 2):
        world.backward([root], retain_graph=True)
        assert len(calls) == 3 * times


def test_a_leaf_that_was_sent_itself() -> None:
    world, leaf, calls = LocalWorld(), leaf_of(1.0), []
    node = node_of(leaf)
    watch: Any = leaf.register_hook
    watch(lambda gradient: gradient * 2)
    node.register_hook(lambda inner, outer: calls.append(outer[0].tolist()))
    back = world.carry_one(world.carry_one(leaf, 0, 1) * 5, 1, 0)
    world.backward([(back * leaf).sum()])
    assert calls == [[20.0] * 2]
    assert world.workers[0].gradients[leaf].tolist() == [20.0] * 2


@pytest.mark.parametrize("changed", [(), ("no tensor",), 1.0])
def test_a_prehook_has_to_return_one_gradient(changed: object) -> None:
    world, leaf = LocalWorld(), leaf_of(1.0)
    node = node_of(leaf)
    node.register_prehook(lambda outer: changed)
    with pytest.raises(RuntimeError, match="must return one gradient or None"):
        world.backward([leaf.sum()])


def test_a_prehook_may_return_the_gradient_alone() -> None:
    world, leaf = LocalWorld(), leaf_of(1.0)
    node = node_of(leaf)
    node.register_prehook(lambda outer: outer[0] * 3)
    world.backward([leaf.sum()])
    assert world.workers[0].gradients[leaf].tolist() == [3.0] * 2


def test_a_prehook_may_take_the_gradient_away() -> None:
    world, leaf, calls = LocalWorld(), leaf_of(1.0), []
    node = node_of(leaf)
    node.register_prehook(lambda outer: (None,))
    node.register_hook(lambda *_: calls.append(1))
    world.backward([leaf.sum()])
    assert not calls
    assert leaf not in world.workers[0].gradients


def test_to_look_for_hooks_leaves_none() -> None:
    leaf = leaf_of(1.0)
    node = node_of(leaf)
    found = hooks_of(node)
    assert [list(each.values()) for each in found] == [[], []]
    first, second = (lambda *_: None), (lambda *_: None)
    node.register_hook(first)
    node.register_prehook(second)
    for _ in range(2):
        assert [list(each.values()) for each in hooks_of(node)] == [[second], [first]]
    # What was found before has them, too.
    assert [list(each.values()) for each in found] == [[second], [first]]
    torch.autograd.backward(leaf.sum())
    assert leaf.grad is not None


def test_hooks_that_wait_for_grad_do_not_run() -> None:
    world, leaf, calls = LocalWorld(), leaf_of(1.0), list[Tensor]()
    watch: Any = leaf.register_post_accumulate_grad_hook
    watch(calls.append)
    world.backward([leaf.sum()])
    assert not calls
    assert leaf in world.workers[0].gradients


def sent_and_come(world: LocalWorld) -> tuple[Tensor, Any]:
    """A leaf of worker 1, and what has come of it at worker 0."""
    leaf = torch.ones(2, dtype=torch.float64, requires_grad=True)
    return leaf, world.carry_one(leaf * 1, 1, 0)


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
    assert world.workers[1].gradients[leaf].tolist() == [4.0, 4.0]


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
