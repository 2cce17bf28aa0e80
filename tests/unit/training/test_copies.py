"""Copies of states: into kept memory, to bytes and back, and who has which after a loss."""

from collections import OrderedDict
from copy import deepcopy
from itertools import combinations
from typing import Any

import pytest
import torch
from support.without_memory import freed
from torch import nn

from hvlike.errors import UsageError
from hvlike.training.elastic.copies import copy_into, flatten_state, read_state
from hvlike.training.elastic.local_state import ArrivingStates, Held, find_sources


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


def held_by(survivors: list[int], ranks: int, generation: int = 0) -> list[list[Held]]:
    """What the survivors of a commit have: their own state, and that of the rank before."""
    return [[Held(generation, ranks, [each, (each - 1) % ranks])] for each in survivors]


def test_who_gives_which_state() -> None:
    # Ranks 0, 1, 3 of four are left, as 0, 1, 2: rank 3 has kept the state of rank 2.
    assert sources_of(held_by([0, 1, 3], 4)) == {0: 0, 1: 1, 3: 2, 2: 2}
    # A spare that has taken over rank 2 has nothing.
    assert sources_of([*held_by([0, 1], 4), [], *held_by([3], 4)]) == {0: 0, 1: 1, 3: 3, 2: 3}
    assert sources_of([[Held(0, 1, [0])]]) == {0: 0}
    assert find_sources([[], []]) is None


def sources_of(told: list[list[Held]]) -> dict[int, int]:
    """The second part of the answer."""
    found = find_sources(told)
    assert found is not None
    return found[1]


def test_a_commit_that_was_saved_again_is_used_if_nothing_of_it_is_lost() -> None:
    before, after = held_by([0, 2, 3], 4), held_by([0, 1, 2], 3, generation=1)
    both = [[*one, *other] for one, other in zip(before, after, strict=True)]
    assert find_sources(both) == (Held(1, 3, [2, 1]), {0: 0, 1: 1, 2: 2})
    # The second of them has not come so far, but its state has.
    assert find_sources([both[0], before[1], both[2]]) == (Held(1, 3, [2, 1]), {0: 0, 2: 2, 1: 2})
    # The first and the second have not: what they have from before is whole.
    assert find_sources([before[0], before[1], both[2]]) == (Held(0, 4, [3, 2]), {0: 0, 2: 1, 3: 2, 1: 1})
    # Nothing is whole.
    assert find_sources([before[0], after[0]]) == (Held(1, 3, [0, 2]), {0: 1, 2: 1})


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_only_two_neighbours_can_lose_a_state(ranks: int) -> None:
    for count in range(1, ranks):
        for lost in combinations(range(ranks), count):
            survivors = [each for each in range(ranks) if each not in lost]
            gone = {each for each in lost if (each + 1) % ranks in lost}
            assert set(sources_of(held_by(survivors, ranks))) == set(range(ranks)) - gone


def test_a_state_as_bytes_and_back() -> None:
    transposed = torch.randn(3, 4).t()
    state = {
        "transposed": transposed,
        "shared": [transposed, torch.tensor(5.0, dtype=torch.bfloat16)],
        "repeated": torch.ones(2).expand(3, 2),
        "empty": torch.zeros(0, 3),
        "flag": torch.tensor([True]),
        "other": ("text", 7, None),
    }
    flat = flatten_state(state)
    read = read_state(flat)
    assert repr(read) == repr(state)
    assert read["transposed"].stride() == (1, 4)
    assert read["shared"][0] is read["transposed"]
    # Memory that is given up is used again, also for less.
    assert flatten_state({"small": torch.ones(3)}, flat).data_ptr() == flat.data_ptr()
    assert read_state(flatten_state({"small": torch.ones(3)}, flat))["small"].tolist() == [1, 1, 1]
    assert flatten_state({"large": torch.ones(1000)}, flat).data_ptr() != flat.data_ptr()


def arriving(log: list[int]) -> ArrivingStates:
    def receive(number: int) -> dict[str, int]:
        log.append(number)
        return {"number": number}

    return ArrivingStates(4, receive)


def test_states_come_in_the_same_order_however_they_are_read() -> None:
    log: list[int] = []
    states = arriving(log)
    assert len(states) == 4
    assert list(states) == [0, 1, 2, 3]
    assert log == []
    assert states[1] == {"number": 1}
    assert log == [0, 1]
    assert [number for number, _ in states.items()] == [0, 1, 2, 3]
    assert log == [0, 1, 2, 3]
    with pytest.raises(KeyError):
        states[4]


def test_what_a_rank_does_not_read_comes_nevertheless() -> None:
    log: list[int] = []
    states = arriving(log)
    for state in states.values():
        if state["number"] == 1:
            break
    states.read_all()
    assert log == [0, 1, 2, 3]
