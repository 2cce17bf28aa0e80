"""Derivatives across ranks: backward equals the change of all ranks' losses, for every collective that has one.

Each rank perturbs its own input in turn; the loss is the sum over all ranks of their own weights times their output.
"""

from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType

import pytest
import torch
from support.collectives.inputs import OPS, same
from torch import Tensor

from hvlike.backends.arithmetic.reduce_op import ReduceOp

Function = Callable[[list[Tensor]], Sequence[Tensor]]
Call = Callable[[ModuleType, Tensor], Tensor]

STEP = 1e-4

EXTREMES = pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX], ids=["min", "max"])


def random(seed: int, shape: Sequence[int], dtype: torch.dtype = torch.float64) -> Tensor:
    """Values that differ and are not near zero: minima and maxima are unique, products smooth."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tuple(shape), dtype=dtype, generator=generator) + 0.5


def leaf_of(hvd: ModuleType, dtype: torch.dtype = torch.float64) -> Tensor:
    return random(hvd.rank(), (hvd.size(), 2)).to(dtype).requires_grad_()


def loss_of(hvd: ModuleType, outputs: Sequence[Tensor]) -> Tensor:
    """This rank's loss: its own weights, and not linear, so that second derivatives are not zero."""
    terms = []
    for index, output in enumerate(outputs):
        weights = random(100 * hvd.rank() + index, output.shape)
        terms.append((weights * output.abs() ** 3).sum() + (weights * output.real).sum())
    return torch.stack(terms).sum()


def measured(hvd: ModuleType, function: Function, inputs: Sequence[Tensor]) -> list[Tensor]:
    """d(sum of all ranks' losses)/d(inputs of this rank), by moving one element of one rank at a time."""
    found = [torch.zeros_like(each) for each in inputs]
    for rank in range(hvd.size()):
        for index, one in enumerate(inputs):
            elements = int(hvd.broadcast(torch.tensor(one.numel()), rank))
            for element in range(elements):
                change = 0.0
                for sign in (1, -1):
                    moved = [each.detach().clone() for each in inputs]
                    if rank == hvd.rank():
                        moved[index].view(-1)[element] += sign * STEP
                    loss = loss_of(hvd, function(moved)).detach()
                    change += sign * hvd.allreduce(loss, op=hvd.Sum).item()
                if rank == hvd.rank():
                    found[index].view(-1)[element] = change / (2 * STEP)
    return found


def agrees(hvd: ModuleType, function: Function, shapes: Sequence[Sequence[int]]) -> None:
    inputs = [random(1000 + 10 * hvd.rank() + index, shape) for index, shape in enumerate(shapes)]
    right = measured(hvd, function, inputs)
    leaves = [each.clone().requires_grad_() for each in inputs]
    loss_of(hvd, function(leaves)).backward()
    for leaf, expected in zip(leaves, right, strict=True):
        torch.testing.assert_close(leaf.grad, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name.lower())
def test_allreduce(hvd: ModuleType, op: ReduceOp) -> None:
    agrees(
        hvd,
        lambda inputs: [hvd.allreduce(inputs[0], op=op, prescale_factor=0.5, postscale_factor=3.0)],
        [(hvd.size(),)],
    )


def test_broadcast_from_every_root(hvd: ModuleType) -> None:
    for root in range(hvd.size()):
        agrees(hvd, lambda inputs, root=root: [hvd.broadcast(inputs[0], root_rank=root)], [(3,)])


def test_allgather_of_uneven_rows_of_scalars_and_of_groups(hvd: ModuleType) -> None:
    # Rank 0 has no row.
    agrees(hvd, lambda inputs: [hvd.allgather(inputs[0])], [(hvd.rank(), 2)])
    agrees(hvd, lambda inputs: [hvd.allgather(inputs[0])], [()])
    agrees(hvd, lambda inputs: hvd.grouped_allgather(inputs, name="rows"), [(2,), (1 + hvd.rank() % 2, 2)])


@pytest.mark.parametrize("op", ["Sum", "Average"])
def test_reducescatter_of_uneven_rows(hvd: ModuleType, op: str) -> None:
    reduce = partial(hvd.reducescatter, op=getattr(hvd, op), prescale_factor=0.5, postscale_factor=3.0, name="rows")
    agrees(hvd, lambda inputs: [reduce(inputs[0])], [(hvd.size() + 1, 2)])


def test_grouped_reducescatter_with_fewer_rows_than_ranks(hvd: ModuleType) -> None:
    agrees(hvd, lambda inputs: hvd.grouped_reducescatter(inputs, op=hvd.Sum), [(1, 2), (2,)])


def test_alltoall_with_splits_and_rows_that_stay_and_without_splits(hvd: ModuleType) -> None:
    splits = [(hvd.rank() + target) % 3 for target in range(hvd.size())]
    agrees(hvd, lambda inputs: hvd.alltoall(inputs[0], splits, name="rows")[:1], [(sum(splits) + 1, 2)])
    agrees(hvd, lambda inputs: [hvd.alltoall(inputs[0])], [(hvd.size(), 2)])


LINEAR: dict[str, Call] = {
    "allreduce": lambda hvd, rows: hvd.allreduce(rows, op=hvd.Sum),
    "average": lambda hvd, rows: hvd.allreduce(rows),
    "broadcast": lambda hvd, rows: hvd.broadcast(rows, 0),
    "allgather": lambda hvd, rows: hvd.allgather(rows),
    "reducescatter": lambda hvd, rows: hvd.reducescatter(rows, op=hvd.Sum, prescale_factor=0.5),
    "alltoall": lambda hvd, rows: hvd.alltoall(rows),
}
CHOOSING: dict[str, Call] = {
    "min": lambda hvd, rows: hvd.allreduce(rows, op=hvd.Min),
    "max": lambda hvd, rows: hvd.allreduce(rows, op=hvd.Max),
}
ALL: dict[str, Call] = LINEAR | CHOOSING | {"product": lambda hvd, rows: hvd.allreduce(rows, op=hvd.Product)}


@pytest.mark.parametrize("call", (LINEAR | CHOOSING).values(), ids=LINEAR | CHOOSING)
def test_second_derivatives(hvd: ModuleType, call: Call) -> None:
    """The first gradient is a function like any other: its own derivative is measured."""

    def slope(inputs: list[Tensor]) -> list[Tensor]:
        leaf = inputs[0] if inputs[0].requires_grad else inputs[0].clone().requires_grad_()
        (first,) = torch.autograd.grad(loss_of(hvd, [call(hvd, leaf)]), leaf, create_graph=True)
        return [first]

    agrees(hvd, slope, [(hvd.size(), 2)])


@pytest.mark.parametrize("call", LINEAR.values(), ids=LINEAR)
def test_complex_numbers(hvd: ModuleType, call: Call) -> None:
    """Real and imaginary parts travel alike: the gradient is that of the parts."""
    whole = random(hvd.rank(), (hvd.size(), 2), torch.complex128).requires_grad_()
    (call(hvd, whole) * (1 - 2j)).abs().pow(2).sum().backward()
    parts = [part.detach().clone().requires_grad_() for part in (whole.real, whole.imag)]
    results = [call(hvd, part) for part in parts]
    (torch.complex(*results) * (1 - 2j)).abs().pow(2).sum().backward()
    torch.testing.assert_close(whole.grad, torch.complex(parts[0].grad, parts[1].grad))


def test_a_product_of_complex_numbers(hvd: ModuleType) -> None:
    def value(rank: int) -> Tensor:
        return torch.tensor([1.0 + rank, 2.0 - 1j * (rank + 1)], dtype=torch.complex128).requires_grad_()

    leaf = value(hvd.rank())
    (hvd.allreduce(leaf, op=hvd.Product) * (1 - 2j)).real.sum().backward()
    # One process that holds all values, with every rank's loss.
    every = [value(rank) for rank in range(hvd.size())]
    (hvd.size() * (torch.stack(every).prod(0) * (1 - 2j)).real.sum()).backward()
    torch.testing.assert_close(leaf.grad, every[hvd.rank()].grad)


@pytest.mark.parametrize("call", ALL.values(), ids=ALL)
def test_expanded_gradients_and_calls_that_run_backward_again(hvd: ModuleType, call: Call) -> None:
    leaf, other = leaf_of(hvd), leaf_of(hvd)
    loss = call(hvd, leaf).sum()
    loss.backward(retain_graph=True)
    once = leaf.grad.clone()
    loss.backward()
    torch.testing.assert_close(leaf.grad, 2 * once)
    result = call(hvd, other)
    (result * torch.ones_like(result)).sum().backward()
    torch.testing.assert_close(other.grad, once)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name.lower())
def test_a_grouped_allreduce_beside_whole_numbers(hvd: ModuleType, op: ReduceOp) -> None:
    leaf, first, second = leaf_of(hvd), leaf_of(hvd), leaf_of(hvd)
    loss_of(hvd, [hvd.allreduce(leaf, op=op, name="loss")]).backward()
    groups = hvd.grouped_allreduce([first, torch.tensor([hvd.rank()]), second.float()], op=op)
    assert not groups[1].requires_grad
    (loss_of(hvd, [groups[0]]) + loss_of(hvd, [groups[2].double()])).backward()
    torch.testing.assert_close(first.grad, leaf.grad)
    torch.testing.assert_close(second.grad, leaf.grad, rtol=1e-4, atol=1e-4)


def test_results_of_a_group_are_used_in_turn_or_not_at_all(hvd: ModuleType) -> None:
    first, second = leaf_of(hvd), leaf_of(hvd)
    results = hvd.grouped_allreduce([first, second], op=hvd.Sum)
    every = torch.full_like(second, float(hvd.size())).detach()
    results[1].sum().backward()
    assert first.grad is None or not first.grad.any()
    same(second.grad, every)
    results[0].sum().backward()
    same(first.grad, every)


def test_whole_numbers_in_a_group_of_rows_have_no_gradient(hvd: ModuleType) -> None:
    leaf, whole = leaf_of(hvd), torch.arange(hvd.size())
    for results in (hvd.grouped_allgather([whole, leaf]), hvd.grouped_reducescatter([whole, leaf], op=hvd.Sum)):
        assert not results[0].requires_grad
        leaf.grad = None
        results[1].sum().backward()
        assert leaf.grad is not None


@EXTREMES
def test_ranks_that_tie_share_the_gradient(hvd: ModuleType, op: ReduceOp) -> None:
    leaf = torch.full((3,), 2.0, requires_grad=True)
    hvd.allreduce(leaf, op=op).sum().backward()
    same(leaf.grad, torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@EXTREMES
def test_the_chosen_element_is_found_in_spite_of_rounding(hvd: ModuleType, op: ReduceOp, dtype: torch.dtype) -> None:
    leaf = leaf_of(hvd, dtype).detach().requires_grad_()
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


def test_a_product_has_no_second_derivative(hvd: ModuleType) -> None:
    leaf = leaf_of(hvd)
    with pytest.raises(ValueError, match="has no second derivative"):
        torch.autograd.grad(hvd.allreduce(leaf, op=hvd.Product).sum(), leaf, create_graph=True)


@pytest.mark.parametrize("op", ["Min", "Max", "Product"])
def test_other_ops_on_rows_say_that_they_have_no_gradient(hvd: ModuleType, op: str) -> None:
    result = hvd.reducescatter(leaf_of(hvd), op=getattr(hvd, op), name="rows")
    with pytest.raises(NotImplementedError, match=f"reducescatter 'rows' with op {op} has no gradient"):
        result.sum().backward()


def test_no_gradient_is_recorded_where_none_is_asked_for(hvd: ModuleType) -> None:
    leaf = leaf_of(hvd)
    for call in LINEAR.values():
        assert call(hvd, leaf).requires_grad
        assert not call(hvd, leaf.detach()).requires_grad
        with torch.no_grad():
            assert not call(hvd, leaf).requires_grad
    for begin in (hvd.allreduce_async, hvd.broadcast_async, hvd.allgather_async, hvd.reducescatter_async):
        handle = begin(leaf, 0) if begin is hvd.broadcast_async else begin(leaf)
        assert not hvd.synchronize(handle).requires_grad
    assert not hvd.synchronize(hvd.grouped_allgather_async([leaf]))[0].requires_grad
    assert not hvd.synchronize(hvd.alltoall_async(leaf))[0].requires_grad
