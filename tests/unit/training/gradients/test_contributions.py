"""What a rank contributes for each parameter, and what it gets back."""

import pytest
import torch
from torch import Tensor

from hvlike.training.gradients.contributions import contributions, lacking, look_at, take_back
from hvlike.training.gradients.grad_state import GradState


def slot_of(
    gradient: Tensor | None, *, arrived: Tensor | None = None, index: int = 0, name: str = "weight"
) -> GradState:
    parameter = torch.zeros(2, requires_grad=True)
    parameter.grad = gradient
    slot = GradState(name, parameter, index)
    slot.handed_over = arrived
    return slot


def test_all_that_has_arrived_is_reduced_where_it_is() -> None:
    gradients = [torch.ones(2), torch.ones(2)]
    slots = [slot_of(gradient, arrived=gradient) for gradient in gradients]
    arrived = look_at(slots, [slot.parameter for slot in slots], [])
    assert arrived.gradients is not None
    assert all(found is gradient for found, gradient in zip(arrived.gradients, gradients, strict=True))
    assert not arrived.were_touched
    assert not arrived.were_exchanged


@pytest.mark.parametrize(
    ("gradient", "changed", "text"),
    [
        (None, [], "Those of 'weight' were set to None"),
        (torch.ones(2), [], "Those of 'weight' were replaced by other tensors"),
        (torch.ones(2), ["bias"], "Those of 'bias' were changed in place"),
    ],
)
def test_what_the_program_has_exchanged_is_an_error(gradient: Tensor | None, changed: list[str], text: str) -> None:
    slot = slot_of(gradient, arrived=torch.ones(2))
    arrived = look_at([slot], [slot.parameter], changed)
    assert arrived.gradients is None
    assert arrived.were_exchanged
    assert text in str(arrived.error())


def test_a_gradient_that_has_not_arrived_is_none_of_an_error() -> None:
    slots = [slot_of(None), slot_of(torch.ones(2))]
    arrived = look_at(slots, [slot.parameter for slot in slots], [])
    assert arrived.gradients is None
    assert not arrived.were_exchanged
    assert not arrived.were_touched


def test_a_rank_contributes_what_has_arrived_else_sums_else_zeros() -> None:
    arrived, sums = torch.full((2,), 3.0), torch.full((2,), 5.0)
    slots = [slot_of(None, arrived=arrived), slot_of(sums, index=1), slot_of(None, index=2)]
    assert lacking(slots, ()) == [2]
    found = contributions(slots, (), densify=False)
    assert found[0] is arrived
    assert found[1] is sums
    assert found[2].tolist() == [0, 0]
    take_back(slots, {}, absent=[])
    # The first one was set to None by the program, and the last one has what stood for it.
    assert [slot.parameter.grad for slot in slots] == [None, sums, found[2]]


def test_what_no_rank_has_keeps_what_it_has() -> None:
    slot = slot_of(None)
    contributions([slot], (), densify=False)
    take_back([slot], {}, absent=[0])
    assert slot.parameter.grad is None


def test_a_gradient_that_no_pass_has_used_is_copied_and_counts_as_nothing() -> None:
    gradient = torch.ones(2)
    slot = slot_of(gradient)
    assert lacking([slot], {slot}) == [0]
    (copy,) = contributions([slot], {slot}, densify=False)
    assert copy is not gradient
    assert copy.tolist() == [1, 1]
    take_back([slot], {}, absent=[])
    assert slot.parameter.grad is copy


def test_sparse_gradients_go_dense_and_come_back_sparse() -> None:
    gradient = torch.ones(2).to_sparse()
    parameter = torch.zeros(2, requires_grad=True)
    parameter.grad = gradient
    slot = GradState("weight", parameter, 0)
    slot.handed_over = gradient
    (wire,) = contributions([slot], (), densify=True)
    assert wire.layout is torch.strided
    wire.mul_(2)
    take_back([slot], {}, absent=[])
    assert slot.parameter.grad is not None
    assert slot.parameter.grad.is_sparse
    assert slot.parameter.grad.to_dense().tolist() == [2, 2]
