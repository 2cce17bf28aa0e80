"""Who has which state after a loss, and states that are read one after the other."""

from itertools import combinations

import pytest
import torch

from hvlike.training.elastic.copies import flatten_state, read_state
from hvlike.training.elastic.local_state import ArrivingStates, Held, find_sources


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
