"""Copies into kept memory: equal to deepcopy's, apart from the original, in the tensors of the copy before."""

from collections import OrderedDict
from copy import deepcopy
from typing import Any

import pytest
import torch
from support.without_memory import freed
from torch import nn

from hvlike.errors import UsageError
from hvlike.training.elastic.copies import copy_into


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(5, 4)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [found for each in value.values() for found in tensors_of(each)]
    return [found for each in value for found in tensors_of(each)] if isinstance(value, (list, tuple)) else []


def test_a_copy_is_what_deepcopy_makes_and_stays_as_it_is() -> None:
    model, optimizer = trained()
    for part in (model, optimizer):
        state = part.state_dict()
        copy = copy_into(None, state)
        assert type(copy) is type(state)
        assert repr(copy) == repr(deepcopy(state))
        before = repr(copy)
        for tensor in tensors_of(state):
            tensor.add_(1)
        assert repr(copy) == before


def test_the_next_copy_lies_in_the_same_memory() -> None:
    _, optimizer = trained()
    first = copy_into(None, optimizer.state_dict())
    places = [tensor.data_ptr() for tensor in tensors_of(first)]
    for tensor in tensors_of(optimizer.state_dict()):
        tensor.mul_(2)
    second = copy_into(first, optimizer.state_dict())
    assert [tensor.data_ptr() for tensor in tensors_of(second)] == places
    assert repr(second) == repr(optimizer.state_dict())


@pytest.mark.parametrize(
    "now",
    [
        {"a": torch.ones(3)},
        {"a": torch.ones(2, dtype=torch.float64)},
        {"a": [torch.ones(2)]},
        {"a": 7},
        {"b": torch.ones(2)},
        [torch.ones(2)],
        {"a": torch.ones(2, 1).t()},
        {"a": torch.ones(1).expand(2)},
        {"a": torch.ones(2).to_sparse()},
        {"a": nn.Parameter(torch.ones(2))},
    ],
)
def test_what_has_changed_its_form_gets_new_memory(now: Any) -> None:
    before = copy_into(None, {"a": torch.zeros(2)})
    copy = copy_into(before, now)
    assert repr(copy) == repr(now)
    if not (isinstance(now, dict) and torch.equal(torch.zeros(2), before["a"])):
        assert tensors_of(copy)[0].shape == tensors_of(now)[0].shape


def test_order_in_memory_is_kept() -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    first = copy_into(None, [image])
    second = copy_into(first, [image + 1])
    assert second[0] is first[0]
    assert second[0].stride() == image.stride()
    assert torch.equal(second[0], image + 1)
    # The same shape in another order is no fit: a copy that is loaded would change the order of the sums.
    assert copy_into(second, [image.contiguous()])[0].stride() == image.contiguous().stride()


def test_tensors_without_memory_are_not_taken_for_one() -> None:
    """They have no address by which tied weights are told."""
    with pytest.raises(UsageError, match="got one whose memory was freed"):
        freed(lambda tensor: copy_into(None, {"a": tensor}))
    with pytest.raises(UsageError, match="got one of torch"):
        copy_into(None, [torch._to_functional_tensor(torch.ones(2)), torch._to_functional_tensor(torch.zeros(2))])
    first, second = copy_into(None, [torch.ones(2, device="meta"), torch.ones(2, device="meta")])
    assert first is not second


def test_tied_weights_are_copied_once_and_versions_of_modules_are_kept() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    copy = copy_into(None, model.state_dict())
    assert isinstance(copy, OrderedDict)
    assert copy["0.weight"] is copy["1.weight"]
    assert vars(copy)["_metadata"] == vars(model.state_dict())["_metadata"]


def test_a_copy_made_in_inference_mode_can_be_written_to_outside() -> None:
    value = {"a": torch.ones(2)}
    with torch.inference_mode():
        copy = copy_into(None, value)
    assert copy_into(copy, {"a": torch.zeros(2)})["a"].tolist() == [0, 0]
