"""Cutting and dealing: every element in exactly one chunk, chunks in turn, turns counted per owner."""

import pytest

from hvlike.backends.shared_memory.schedule import (
    CHUNK_BYTES,
    SMALLEST_CHUNK_BYTES,
    Chunk,
    Turns,
    chunk_bytes,
    cut,
    cut_together,
)


@pytest.mark.parametrize(
    ("lengths", "elements", "runs"),
    [
        ([], 4, []),
        ([0], 4, []),
        ([3], 4, [(0, 0, 3)]),
        ([4], 4, [(0, 0, 4)]),
        ([5], 4, [(0, 0, 4), (0, 4, 5)]),
        ([2, 0, 9], 4, [(0, 0, 2), (2, 0, 4), (2, 4, 8), (2, 8, 9)]),
    ],
)
def test_pieces_are_cut_in_order(lengths: list[int], elements: int, runs: list[tuple[int, int, int]]) -> None:
    assert cut(lengths, elements) == runs


@pytest.mark.parametrize(
    ("lengths", "together", "most", "chunks"),
    [
        pytest.param([], 10, 9, [], id="nothing"),
        pytest.param([0, 3, 0], 10, 9, [[(1, 0, 3)]], id="empty ones are left out"),
        pytest.param([4, 9, 4], 10, 9, [[(0, 0, 4), (2, 0, 4)], [(1, 0, 6)], [(1, 6, 9)]], id="long ones apart"),
        pytest.param([4, 4, 4], 8, 9, [[(0, 0, 4), (1, 0, 4)], [(2, 0, 4)]], id="until a chunk is full"),
        pytest.param([1, 1, 1], 10, 2, [[(0, 0, 1), (1, 0, 1)], [(2, 0, 1)]], id="until it has many"),
        pytest.param([4, 4], 3, 9, [[(0, 0, 4)], [(1, 0, 4)]], id="one fits in any case"),
        pytest.param([5], 10, 9, [[(0, 0, 5)]], id="from there on it is long"),
    ],
)
def test_short_pieces_make_chunks_together(
    lengths: list[int], together: int, most: int, chunks: list[list[tuple[int, int, int]]]
) -> None:
    assert cut_together(lengths, 6, 5, together, most) == chunks


def test_chunks_are_dealt_in_turn_and_dealing_goes_on_where_it_stopped() -> None:
    turns = Turns.start(3)
    first = turns.deal(cut([5], 1))
    assert [(chunk.owner, chunk.turn) for chunk in first] == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1)]
    second = turns.deal(cut([2], 1))
    assert [(chunk.owner, chunk.turn) for chunk in second] == [(2, 1), (0, 2)]


def test_one_owner_can_be_given_everything() -> None:
    turns = Turns.start(2)
    assert turns.give(cut([3], 2), 1) == [Chunk(0, 0, 2, 1, 0), Chunk(0, 2, 3, 1, 1)]
    assert turns.deal(cut([1], 1)) == [Chunk(0, 0, 1, 0, 0)]


def test_runs_keep_their_owners_when_they_are_split() -> None:
    turns = Turns.start(2)
    chunks = turns.split([(0, 0, 5, 1), (0, 5, 6, 0)], 3)
    assert chunks == [Chunk(0, 0, 3, 1, 0), Chunk(0, 3, 5, 1, 1), Chunk(0, 5, 6, 0, 0)]


@pytest.mark.parametrize(
    ("ranks", "budget", "expected"),
    [
        (2, 1 << 20, CHUNK_BYTES),
        (2, 512 << 10, CHUNK_BYTES),
        (4, 2 << 20, CHUNK_BYTES),
        (5, 2 << 20, CHUNK_BYTES),
        (9, 2 << 20, CHUNK_BYTES // 2),
        (64, 2 << 20, SMALLEST_CHUNK_BYTES),
        (64, 1, SMALLEST_CHUNK_BYTES),
    ],
)
def test_chunks_shrink_so_that_the_slots_of_a_rank_fit_its_budget(ranks: int, budget: int, expected: int) -> None:
    assert chunk_bytes(ranks, budget) == expected
