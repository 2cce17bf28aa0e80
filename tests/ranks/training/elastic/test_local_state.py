"""What only one rank has is kept by its neighbour at a commit, and given back whoever is lost."""

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import pytest
import torch
from support.training.pretended_loss import COMMIT, after_loss, give_back

from hvlike.training.elastic.local_state import LocalStates

pytestmark = pytest.mark.differs_by_ranks(2)


class Part:
    """Remembers what it is given."""

    def __init__(self, rank: int = 0) -> None:
        self.value = {"rank": rank, "memory": torch.full((1000,), float(rank))}

    def local_state_dict(self) -> dict[str, Any]:
        """A number and a tensor."""
        return self.value

    def load_local_state_dicts(self, states: Mapping[int, dict[str, Any]], ranks_before: int) -> None:
        """Keep the sums."""
        self.ranks_before = ranks_before
        self.ranks = [state["rank"] for state in states.values()]
        if len(states) == 1:
            self.value = states[self.ranks[0]]


def test_each_rank_gets_its_own_back(hvd: ModuleType) -> None:
    held, part = LocalStates("part"), Part(hvd.rank())
    for number in range(4):
        held.forget(number - 1)
        held.save(number, part.local_state_dict)
        part.value["memory"] += 1
    assert sorted(held.commits) == [(2, 0), (3, 0)]
    assert list(held.commits[3, 0].flats) == list(dict.fromkeys([hvd.rank(), (hvd.rank() - 1) % hvd.size()]))
    give_back(held, 2, part)
    assert part.ranks == [hvd.rank()]
    assert part.value["memory"][0] == hvd.rank() + 2
    # What is loaded is a copy, and the later commit is no longer there.
    part.value["memory"] += 100
    assert list(held.commits) == [(2, 0)]
    give_back(held, 2, part)
    assert part.value["memory"][0] == hvd.rank() + 2


@pytest.mark.mpi(min_size=2)
def test_a_spare_gets_the_copy_of_the_rank_it_stands_for(hvd: ModuleType) -> None:
    for lost in range(hvd.size()):
        held, part = LocalStates("part"), Part(hvd.rank())
        held.save(1, part.local_state_dict)
        if hvd.rank() == lost:
            held, part = LocalStates("part"), Part(99)
        give_back(held, 1, part)
        assert part.value["rank"] == hvd.rank()
        assert part.value["memory"].tolist() == [hvd.rank()] * 1000


@pytest.mark.mpi(min_size=2)
def test_every_rank_is_told_what_two_lost_neighbours_had(hvd: ModuleType) -> None:
    held, part = LocalStates("part"), Part(hvd.rank())
    held.save(1, part.local_state_dict)
    if hvd.rank() < 2:
        held = LocalStates("part")
    found = held.find(1)
    # Of two, nobody knows of a commit.
    assert (found.ranks, found.lost) == ((0, []) if hvd.size() == 2 else (hvd.size(), [0]))
    held.give_up(found, part)
    assert (part.ranks, part.ranks_before, held.commits) == ([], hvd.size(), {})


@pytest.mark.mpi(min_size=2)
def test_a_second_loss_before_the_copies_are_made_anew(hvd: ModuleType) -> None:
    """Rank 1 has not come to save the commit again; what all have from before is used."""
    held, part = LocalStates("part"), Part(hvd.rank())
    held.save(1, part.local_state_dict)
    give_back(held, 1, part)
    held.save(1, part.local_state_dict)
    if hvd.rank() == 1:
        del held.commits[1, 1]
    give_back(held, 1, part)
    # Without rank 1's own the newer one is whole, as its neighbour has it.
    assert list(held.commits) == ([] if hvd.rank() == 1 else [(1, 1)])
    assert part.value["memory"].tolist() == [hvd.rank()] * 1000
    held.save(1, part.local_state_dict)
    assert (1, 2) in held.commits


def test_fewer_ranks_read_the_states_of_all(hvd: ModuleType) -> None:
    before = hvd.size() + 1
    states = {rank: Part(rank).value for rank in range(before)}
    for lost in range(before):
        part = Part()
        give_back(after_loss(hvd, states, [lost]), COMMIT, part)
        assert part.ranks == list(range(before))
        assert part.ranks_before == before


def test_an_object_without_local_state_costs_nothing(hvd: ModuleType) -> None:
    held, part = LocalStates("part"), Part()
    held.save(1, dict)
    assert not held.commits
    part.value = {}
    give_back(held, 1, part)
    assert (part.value, part.ranks) == ({}, [])


def test_an_error_of_one_rank_does_not_hold_the_others(hvd: ModuleType) -> None:
    class Stubborn(Part):
        def load_local_state_dicts(self, states: Mapping[int, dict[str, Any]], ranks_before: int) -> None:
            if hvd.rank() == 0:
                raise ValueError("no")
            super().load_local_state_dicts(states, ranks_before)

    states = {rank: Part(rank).value for rank in range(hvd.size() + 1)}
    held, part = after_loss(hvd, states, [0]), Stubborn()
    if hvd.rank() == 0:
        with pytest.raises(ValueError, match="no"):
            give_back(held, COMMIT, part)
    else:
        give_back(held, COMMIT, part)
        assert part.ranks == list(range(hvd.size() + 1))
    hvd.barrier()
