"""Derivatives of allgather, alltoall and reducescatter across ranks: backward equals the change of all ranks' losses.

Each rank perturbs its own input in turn; the loss is the sum over all ranks of their own weights times their output.
"""

from collections.abc import Callable, Sequence
from types import ModuleType

import pytest
import torch
from torch import Tensor

Function = Callable[[list[Tensor]], Sequence[Tensor]]

STEP = 1e-4


def random(seed: int, shape: Sequence[int], dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tuple(shape), dtype=dtype, generator=generator) + 0.5


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


def test_allgather_of_uneven_rows(hvd: ModuleType) -> None:
    # Rank 0 has no row.
    agrees(hvd, lambda inputs: [hvd.allgather(inputs[0])], [(hvd.rank(), 2)])


def test_allgather_of_scalars(hvd: ModuleType) -> None:
    agrees(hvd, lambda inputs: [hvd.allgather(inputs[0])], [()])


def test_grouped_allgather(hvd: ModuleType) -> None:
    agrees(hvd, lambda inputs: hvd.grouped_allgather(inputs, name="rows"), [(2,), (1 + hvd.rank() % 2, 2)])


@pytest.mark.parametrize("op", ["Sum", "Average"])
def test_reducescatter_of_uneven_rows(hvd: ModuleType, op: str) -> None:
    agrees(
        hvd,
        lambda inputs: [
            hvd.reducescatter(inputs[0], op=getattr(hvd, op), prescale_factor=0.5, postscale_factor=3.0, name="rows")
        ],
        [(hvd.size() + 1, 2)],
    )


def test_grouped_reducescatter_with_fewer_rows_than_ranks(hvd: ModuleType) -> None:
    agrees(hvd, lambda inputs: hvd.grouped_reducescatter(inputs, op=hvd.Sum), [(1, 2), (2,)])


def test_alltoall_with_splits_and_rows_that_stay(hvd: ModuleType) -> None:
    splits = [(hvd.rank() + target) % 3 for target in range(hvd.size())]
    agrees(hvd, lambda inputs: hvd.alltoall(inputs[0], splits, name="rows")[:1], [(sum(splits) + 1, 2)])


def test_alltoall_without_splits(hvd: ModuleType) -> None:
    agrees(hvd, lambda inputs: [hvd.alltoall(inputs[0])], [(hvd.size(), 2)])


CALLS: dict[str, Callable[[ModuleType, Tensor], Tensor]] = {
    "allgather": lambda hvd, rows: hvd.allgather(rows),
    "reducescatter": lambda hvd, rows: hvd.reducescatter(rows, op=hvd.Sum, prescale_factor=0.5),
    "alltoall": lambda hvd, rows: hvd.alltoall(rows),
}
calls = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@calls
def test_second_derivatives(hvd: ModuleType, call: Callable[[ModuleType, Tensor], Tensor]) -> None:
    """The first gradient is a function like any other: its own derivative is measured."""

    def slope(inputs: list[Tensor]) -> list[Tensor]:
        leaf = inputs[0] if inputs[0].requires_grad else inputs[0].clone().requires_grad_()
        (first,) = torch.autograd.grad(loss_of(hvd, [call(hvd, leaf)]), leaf, create_graph=True)
        return [first]

    agrees(hvd, slope, [(hvd.size(), 2)])


@calls
def test_complex_numbers(hvd: ModuleType, call: Callable[[ModuleType, Tensor], Tensor]) -> None:
    """Real and imaginary parts travel alike: the gradient is that of the parts."""
    whole = random(hvd.rank(), (hvd.size(), 2), torch.complex128).requires_grad_()
    (call(hvd, whole) * (1 - 2j)).abs().pow(2).sum().backward()
    parts = [part.detach().clone().requires_grad_() for part in (whole.real, whole.imag)]
    results = [call(hvd, part) for part in parts]
    (torch.complex(*results) * (1 - 2j)).abs().pow(2).sum().backward()
    torch.testing.assert_close(whole.grad, torch.complex(parts[0].grad, parts[1].grad))


@calls
def test_expanded_gradients_and_named_calls_run_again(
    hvd: ModuleType, call: Callable[[ModuleType, Tensor], Tensor]
) -> None:
    leaf = random(hvd.rank(), (hvd.size(), 2)).requires_grad_()
    loss = call(hvd, leaf).sum()
    loss.backward(retain_graph=True)
    once = leaf.grad.clone()
    loss.backward()
    torch.testing.assert_close(leaf.grad, 2 * once)


def test_whole_numbers_in_a_group_have_no_gradient(hvd: ModuleType) -> None:
    leaf = random(hvd.rank(), (hvd.size(), 2)).requires_grad_()
    whole = torch.arange(hvd.size())
    for results in (hvd.grouped_allgather([whole, leaf]), hvd.grouped_reducescatter([whole, leaf], op=hvd.Sum)):
        assert not results[0].requires_grad
        leaf.grad = None
        results[1].sum().backward()
        assert leaf.grad is not None


@pytest.mark.parametrize("op", ["Min", "Max", "Product"])
def test_other_ops_say_that_they_have_no_gradient(hvd: ModuleType, op: str) -> None:
    leaf = random(hvd.rank(), (hvd.size(), 2)).requires_grad_()
    result = hvd.reducescatter(leaf, op=getattr(hvd, op), name="rows")
    with pytest.raises(NotImplementedError, match=f"reducescatter 'rows' with op {op} has no gradient"):
        result.sum().backward()


def test_no_gradient_is_recorded_where_none_is_asked_for(hvd: ModuleType) -> None:
    leaf = random(hvd.rank(), (hvd.size(), 2)).requires_grad_()
    for call in CALLS.values():
        assert call(hvd, leaf).requires_grad
        assert not call(hvd, leaf.detach()).requires_grad
        with torch.no_grad():
            assert not call(hvd, leaf).requires_grad
    handles = [hvd.allgather_async(leaf), hvd.reducescatter_async(leaf), hvd.grouped_allgather_async([leaf])]
    assert not hvd.synchronize(handles[0]).requires_grad
    assert not hvd.synchronize(handles[1]).requires_grad
    assert not hvd.synchronize(handles[2])[0].requires_grad
    assert not hvd.synchronize(hvd.alltoall_async(leaf))[0].requires_grad
