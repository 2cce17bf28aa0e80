"""Gradients in the map of a context: whose memory they are in, their strides, and sums of dense and sparse ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.autograd.local_world import LocalWorld
from torch import Tensor

from hvlike.autograd import accumulate_grad
from hvlike.autograd.accumulate_grad import accumulate, is_sole


def leaf_of(*shape: int) -> Tensor:
    return torch.ones(shape, requires_grad=True)


def sparse(value: float) -> Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[1]]), torch.tensor([[value, value]]), (3, 2), check_invariants=True)


def test_a_gradient_that_nobody_else_has_is_kept_as_it_is() -> None:
    leaf, gradient, gradients = leaf_of(2, 3), torch.rand(2, 3), dict[Tensor, Tensor]()
    accumulate(gradients, leaf, gradient, sole=True)
    assert gradients[leaf].data_ptr() == gradient.data_ptr()
    assert not gradients[leaf].requires_grad


@pytest.mark.parametrize("leaf", [leaf_of(2, 3), torch.ones(3, 2).t().requires_grad_()], ids=["rows", "columns"])
@pytest.mark.parametrize("gradient", [torch.rand(1).expand(2, 3), torch.rand(2, 3).double(), torch.rand(2, 6)[:, ::2]])
def test_one_that_lies_otherwise_than_the_leaf_is_copied(gradient: Tensor, leaf: Tensor) -> None:
    gradients: dict[Tensor, Tensor] = {}
    accumulate(gradients, leaf, gradient, sole=True)
    assert gradients[leaf].data_ptr() != gradient.data_ptr()
    assert gradients[leaf].stride() == leaf.stride()
    torch.testing.assert_close(gradients[leaf], gradient.float())


def test_what_was_fetched_before_shows_the_new_sum() -> None:
    leaf, gradients = leaf_of(3), dict[Tensor, Tensor]()
    accumulate(gradients, leaf, torch.ones(3), sole=False)
    before = gradients[leaf]
    accumulate(gradients, leaf, torch.ones(3), sole=False)
    assert gradients[leaf] is before
    assert before.tolist() == [2.0] * 3


@pytest.mark.parametrize("first", ["dense", "sparse"])
@pytest.mark.parametrize("second", ["dense", "sparse"])
def test_sums_of_dense_and_sparse(first: str, second: str) -> None:
    made = {"dense": lambda: torch.ones(3, 2), "sparse": lambda: sparse(2.0)}
    # A second reference, as this test looks at them later: from Python 3.14 on a call's arguments do not count as one.
    one, other = kept = made[first](), made[second]()
    assert not any(is_sole(each) for each in kept)
    leaf, gradients = leaf_of(3, 2), dict[Tensor, Tensor]()
    accumulate(gradients, leaf, one, sole=is_sole(one))
    accumulate(gradients, leaf, other, sole=is_sole(other))
    assert gradients[leaf].is_sparse is (first == second == "sparse")
    torch.testing.assert_close(gradients[leaf].to_dense(), made[first]().to_dense() + made[second]().to_dense())
    torch.testing.assert_close(one.to_dense(), made[first]().to_dense())


def test_who_else_refers_to_a_tensor() -> None:
    fresh = torch.ones(3)
    assert is_sole(fresh)
    view = fresh[:2]
    assert not is_sole(fresh)
    assert not is_sole(view)
    del fresh
    assert not is_sole(view)
    other = torch.ones(3)
    same = other
    assert not is_sole(other)
    assert not is_sole(same)
    kept = torch.ones(3, requires_grad=True)
    graph = kept.exp()
    assert not is_sole(graph)
    assert not is_sole(sparse(1.0))


def test_a_view_is_nobody_elses_when_only_it_refers_to_what_it_is_a_view_of() -> None:
    whole = torch.ones(2, 3)
    view = whole.t()
    assert not is_sole(view)
    del whole
    assert is_sole(view)
    same = view.t()
    assert not is_sole(view)
    assert not is_sole(same)
    assert not is_sole(torch.ones(1).expand(4))


def test_the_gradients_of_a_linear_layer_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    world, layer = LocalWorld(), torch.nn.Linear(5, 7)
    monkeypatch.setattr(accumulate_grad, "_copy", None)
    world.backward([layer(torch.ones(3, 5)).exp().sum()])
    gradients = world.workers[0].gradients
    layer(torch.ones(3, 5)).exp().sum().backward()
    for parameter in layer.parameters():
        assert torch.equal(gradients[parameter], parameter.grad)


class Remembers(torch.autograd.Function):
    """Gives the same tensor as gradient each time."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return value * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient, None


def test_memory_of_the_graph_and_of_other_leaves_is_not_written_to() -> None:
    world = LocalWorld()
    remembered = torch.full((3,), 5.0)
    one, other, third, factor = leaf_of(3), leaf_of(3), leaf_of(3), leaf_of(3)
    remember: Any = Remembers.apply
    root = ((one + other) * factor).sum() + remember(third, remembered).sum() + one.sum()
    for times in range(1, 4):
        world.backward([root], retain_graph=True)
        gradients = world.workers[0].gradients
        assert gradients[one].tolist() == [2.0 * times] * 3
        assert gradients[other].tolist() == [1.0 * times] * 3
        assert gradients[third].tolist() == [5.0 * times] * 3
        assert gradients[factor].tolist() == [2.0 * times] * 3
    assert remembered.tolist() == [5.0] * 3
