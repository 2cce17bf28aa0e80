"""ZeRO: parameters are assigned by size, those that share memory to one owner; copies of a state keep apart."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hvlike.training.gradients.aliases import first_sharers
from hvlike.training.zero.exchange import Partition, assign_owners
from hvlike.training.zero.sharded_state import StateLock


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_the_four_sizes_of_torchs_test_give_every_rank_24_elements(ranks: int) -> None:
    sizes = [size for size in (9, 7, 5, 3) for _ in range(ranks)]
    (owners,) = assign_owners([sizes], ranks)
    assert [sum(s for s, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(ranks)] == [
        24
    ] * ranks


@pytest.mark.parametrize(
    ("groups", "ranks", "expected"),
    [
        ([[9, 7, 5, 3]], 2, [[0, 1, 1, 0]]),
        ([[3, 5, 7, 9]], 2, [[0, 1, 1, 0]]),
        ([[4, 4, 4]], 3, [[0, 1, 2]]),
        ([[1]], 4, [[0]]),
        ([[9, 7], [3, 5]], 2, [[0, 1], [0, 1]]),
        ([[2, 2], []], 2, [[0, 1], []]),
    ],
)
def test_examples(groups: list[list[int]], ranks: int, expected: list[list[int]]) -> None:
    assert assign_owners(groups, ranks) == expected


SIZES = st.lists(st.integers(0, 1000), max_size=20)


@settings(max_examples=40)
@given(st.lists(SIZES, max_size=4), st.integers(1, 6))
def test_no_rank_holds_more_than_the_mean_and_one_largest(groups: list[list[int]], ranks: int) -> None:
    owners = assign_owners(groups, ranks)
    held = [0] * ranks
    for sizes, chosen in zip(groups, owners, strict=True):
        for size, owner in zip(sizes, chosen, strict=True):
            held[owner] += size
    largest = max((size for sizes in groups for size in sizes), default=0)
    assert max(held) - min(held) <= largest


@settings(max_examples=40)
@given(st.lists(SIZES, min_size=1, max_size=4), st.integers(1, 6))
def test_a_group_that_is_added_moves_nothing(groups: list[list[int]], ranks: int) -> None:
    assert assign_owners(groups, ranks)[:-1] == assign_owners(groups[:-1], ranks)


BASE = torch.zeros(12)


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ([], []),
        ([torch.zeros(2), torch.zeros(2)], [0, 1]),
        ([BASE, BASE], [0, 0]),
        ([BASE[:4], BASE[4:8], BASE[8:]], [0, 1, 2]),
        ([BASE[:5], BASE[8:], BASE[4:8]], [0, 1, 0]),
        ([BASE[8:], BASE[4:9], torch.zeros(1), BASE[:5]], [0, 0, 2, 0]),
        ([BASE.view(3, 4)[:, 0], BASE.view(3, 4)[:, 1]], [0, 0]),
        ([BASE[:0], BASE[:0], torch.empty(0)], [0, 1, 2]),
        ([torch.zeros(1).expand(3), torch.empty(3, device="meta")], [0, 1]),
    ],
)
def test_first_sharers(tensors: list[Tensor], expected: list[int]) -> None:
    assert first_sharers(tensors) == expected


def test_one_owner() -> None:
    assert assign_owners([[9, 7, 5, 3]], 2) == [[0, 1, 1, 0]]
    assert assign_owners([[9, 7, 5], [3, 2]], 2, [0, 1, 2, 0, 1]) == [[0, 1, 1], [0, 1]]
    partition = Partition([{"params": [BASE[:6], torch.zeros(6)]}, {"params": [BASE[3:9]]}], 3)
    assert partition.owners[0] == partition.owners[2]


def in_another_thread(changes: StateLock, *, wait: bool) -> bool:
    """Whether a copy may be made there."""
    found = []

    def look() -> None:
        with changes.copy(wait=wait) as allowed:
            found.append(allowed)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found[0]


def test_no_copy_during_a_change() -> None:
    changes = StateLock()
    with changes.change():
        assert changes.under_way
        assert not in_another_thread(changes, wait=False)
        # Also who would wait for another copy does not wait for a change: it may be his own.
        assert not in_another_thread(changes, wait=True)
        with changes.copy(wait=True) as allowed:
            assert not allowed
    assert not changes.under_way
    assert in_another_thread(changes, wait=False)


def test_the_loop_does_not_wait_for_a_copy() -> None:
    changes = StateLock()
    with changes.copy(wait=True) as allowed:
        assert allowed
        assert not changes.under_way
        assert not in_another_thread(changes, wait=False)
    assert in_another_thread(changes, wait=True)


def test_a_change_that_fails_is_over() -> None:
    changes = StateLock()
    with pytest.raises(ZeroDivisionError), changes.change():
        raise ZeroDivisionError
    assert in_another_thread(changes, wait=False)
