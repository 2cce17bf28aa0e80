"""Derivatives across ranks: what backward returns equals the change of all ranks' losses, measured."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from support.collectives.inputs import OPS, same
from torch import Tensor

from hvlike.backends.arithmetic.reduce_op import ReduceOp

STEP = 1e-5
FACTORS = [(1.0, 1.0), (0.5, 3.0)]
names = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name.lower())


def inputs_of(rank: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """All different over elements and ranks, none near zero: minima and maxima are unique, products smooth."""
    generator = torch.Generator().manual_seed(5)
    every = torch.rand(8, 6, dtype=torch.float64, generator=generator) + 0.5
    return every[rank].to(dtype).requires_grad_()


def weights_of(rank: int) -> Tensor:
    return torch.linspace(-1, 1 + rank, 6, dtype=torch.float64)


def measured_gradient(hvd: ModuleType, function: Callable[[Tensor], Tensor]) -> Tensor:
    """d(sum of all ranks' losses)/d(input of this rank), by moving one element of one rank at a time."""
    mine = torch.zeros(6, dtype=torch.float64)
    for rank in range(hvd.size()):
        for index in range(6):
            change = 0.0
            for sign in (1, -1):
                moved = inputs_of(hvd.rank()).detach()
                if rank == hvd.rank():
                    moved[index] += sign * STEP
                loss = (weights_of(hvd.rank()) * function(moved)).sum()
                change += sign * hvd.allreduce(loss, op=hvd.Sum).item()
            if rank == hvd.rank():
                mine[index] = change / (2 * STEP)
    return mine


def computed_gradient(hvd: ModuleType, function: Callable[[Tensor], Tensor]) -> Tensor:
    leaf = inputs_of(hvd.rank())
    (weights_of(hvd.rank()) * function(leaf)).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


@names
def test_allreduce(hvd: ModuleType, op: ReduceOp) -> None:
    def function(tensor: Tensor) -> Tensor:
        result: Tensor = hvd.allreduce(tensor, op=op, prescale_factor=0.5, postscale_factor=3.0)
        return result

    torch.testing.assert_close(computed_gradient(hvd, function), measured_gradient(hvd, function), rtol=1e-6, atol=1e-6)


@names
def test_grouped_allreduce(hvd: ModuleType, op: ReduceOp) -> None:
    leaf = inputs_of(hvd.rank())
    (weights_of(hvd.rank()) * hvd.allreduce(leaf, op=op)).sum().backward()
    first, second = inputs_of(hvd.rank()), inputs_of(hvd.rank())
    whole = torch.tensor([hvd.rank()])
    groups = hvd.grouped_allreduce([first, whole, second.float()], op=op)
    assert not groups[1].requires_grad
    (weights_of(hvd.rank()) * (groups[0] + groups[2])).sum().backward()
    torch.testing.assert_close(first.grad, leaf.grad)
    torch.testing.assert_close(second.grad, leaf.grad, rtol=1e-5, atol=1e-5)


def test_backward_from_each_result_of_a_group_in_turn(hvd: ModuleType) -> None:
    leaves = [inputs_of(hvd.rank()), inputs_of(hvd.rank())]
    for result in hvd.grouped_allreduce(leaves, op=hvd.Sum):
        result.sum().backward()
    for leaf in leaves:
        same(leaf.grad, torch.full((6,), float(hvd.size()), dtype=torch.float64))


def test_a_group_of_which_one_result_is_used(hvd: ModuleType) -> None:
    first, second = inputs_of(hvd.rank()), inputs_of(hvd.rank())
    hvd.grouped_allreduce([first, second], op=hvd.Sum)[1].sum().backward()
    assert first.grad is None or not first.grad.any()
    same(second.grad, torch.full((6,), float(hvd.size()), dtype=torch.float64))


def test_broadcast_from_every_root(hvd: ModuleType) -> None:
    for root in range(hvd.size()):
        gradient = computed_gradient(hvd, lambda tensor, root=root: hvd.broadcast(tensor, root_rank=root))
        total = torch.stack([weights_of(rank) for rank in range(hvd.size())]).sum(dim=0)
        same(gradient, total if hvd.rank() == root else torch.zeros(6, dtype=torch.float64))


@names
def test_expanded_gradients(hvd: ModuleType, op: ReduceOp) -> None:
    leaf = inputs_of(hvd.rank())
    hvd.allreduce(leaf, op=op).sum().backward()
    other = inputs_of(hvd.rank())
    (hvd.allreduce(other, op=op) * torch.ones(6, dtype=torch.float64)).sum().backward()
    torch.testing.assert_close(leaf.grad, other.grad)


@names
def test_named_operations_may_run_backward_again(hvd: ModuleType, op: ReduceOp) -> None:
    for _ in range(2):
        leaf = inputs_of(hvd.rank())
        loss = hvd.allreduce(leaf, name="loss", op=op).sum()
        loss.backward(retain_graph=True)
        once = leaf.grad.clone()
        loss.backward()
        torch.testing.assert_close(leaf.grad, 2 * once)


@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX], ids=["min", "max"])
def test_ranks_that_tie_share_the_gradient(hvd: ModuleType, op: ReduceOp) -> None:
    leaf = torch.full((3,), 2.0, requires_grad=True)
    hvd.allreduce(leaf, op=op).sum().backward()
    same(leaf.grad, torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX], ids=["min", "max"])
def test_the_chosen_element_is_found_in_spite_of_rounding(hvd: ModuleType, op: ReduceOp, dtype: torch.dtype) -> None:
    leaf = inputs_of(hvd.rank(), dtype).detach().requires_grad_()
    # Factors that no binary fraction holds: the result is rounded.
    result = hvd.allreduce(leaf, op=op, prescale_factor=0.1, postscale_factor=0.3)
    result.sum().backward()
    chosen = hvd.allreduce((leaf.grad != 0).int(), op=hvd.Sum)
    assert bool((chosen >= 1).all())


def test_a_product_with_zeros(hvd: ModuleType) -> None:
    # Element 0 has no zero, element 1 one on rank 0, element 2 one on every rank.
    mine = [2.0, 0.0 if hvd.rank() == 0 else 2.0, 0.0]
    leaf = torch.tensor(mine, dtype=torch.float64, requires_grad=True)
    hvd.allreduce(leaf, op=hvd.Product).sum().backward()
    n, others = hvd.size(), 2.0 ** (hvd.size() - 1)
    expected = [n * others, n * others if hvd.rank() == 0 else 0.0, 1.0 if n == 1 else 0.0]
    same(leaf.grad, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("op", [ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.PRODUCT], ids=lambda op: op.name.lower())
def test_complex_numbers(hvd: ModuleType, op: ReduceOp) -> None:
    def value(rank: int) -> Tensor:
        return torch.tensor([1.0 + rank, 2.0 - 1j * (rank + 1)], dtype=torch.complex128)

    leaf = value(hvd.rank()).requires_grad_()
    result = hvd.allreduce(leaf, op=op)
    (result * (1 - 2j)).real.sum().backward()
    # One process that holds all values, with every rank's loss.
    every = [value(rank).requires_grad_() for rank in range(hvd.size())]
    stacked = torch.stack(every)
    reduced = stacked.prod(0) if op is hvd.Product else stacked.mean(0) if op is hvd.Average else stacked.sum(0)
    (hvd.size() * (reduced * (1 - 2j)).real.sum()).backward()
    torch.testing.assert_close(leaf.grad, every[hvd.rank()].grad)


@pytest.mark.parametrize(
    "op", [ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX], ids=lambda op: op.name.lower()
)
def test_second_derivatives(hvd: ModuleType, op: ReduceOp) -> None:
    def second(inputs: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        (first,) = torch.autograd.grad((reduce(inputs) ** 3).sum(), inputs, create_graph=True)
        (result,) = torch.autograd.grad((first**2).sum(), inputs)
        return result

    leaf = inputs_of(hvd.rank())
    found = second(leaf, lambda tensor: hvd.allreduce(tensor, op=op))
    # In one process: every rank's copy of the result is a loss of its own.
    every = torch.stack([inputs_of(rank).detach() for rank in range(hvd.size())]).requires_grad_()
    reductions: dict[ReduceOp, Callable[[Tensor], Tensor]] = {
        hvd.Average: lambda each: each.mean(0),
        hvd.Sum: lambda each: each.sum(0),
        hvd.Min: lambda each: each.amin(0),
        hvd.Max: lambda each: each.amax(0),
    }
    expected = second(every, lambda each: reductions[op](each).expand(hvd.size(), 6))
    torch.testing.assert_close(found, expected[hvd.rank()])


def test_a_product_has_no_second_derivative(hvd: ModuleType) -> None:
    leaf = inputs_of(hvd.rank())
    with pytest.raises(ValueError, match="has no second derivative"):
        torch.autograd.grad(hvd.allreduce(leaf, op=hvd.Product).sum(), leaf, create_graph=True)


def test_no_gradient_is_recorded_where_none_is_asked_for(hvd: ModuleType) -> None:
    leaf = inputs_of(hvd.rank())
    assert hvd.allreduce(leaf).requires_grad
    assert hvd.broadcast(leaf, 0).requires_grad
    assert not hvd.allreduce(leaf.detach()).requires_grad
    assert not hvd.synchronize(hvd.allreduce_async(leaf)).requires_grad
    with torch.no_grad():
        assert not hvd.allreduce(leaf).requires_grad
        assert not hvd.broadcast(leaf, 0).requires_grad
