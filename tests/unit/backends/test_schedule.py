"""Cutting and dealing: every element in exactly one chunk, chunks in turn, turns counted per owner."""

import pytest

from hvlike.backends.shared_memory.schedule import (
    CHUNK_BYTES,
    SMALLEST_CHUNK_BYTES,
    Chunk,
    assign,
    chunk_bytes,
    cut,
    cut_together,
    deal,
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


def test_short_tensors_share_chunks_and_all_chunks_are_dealt_in_turn() -> None:
    assert deal([1, 10, 2], 2, largest=4, smallest=1, short=3) == [
        Chunk(((0, 0, 1),), 0),
        Chunk(((2, 0, 2),), 1),
        Chunk(((1, 0, 4),), 0),
        Chunk(((1, 4, 8),), 1),
        Chunk(((1, 8, 10),), 0),
    ]
    assert deal([1, 2, 1], 2, largest=4, smallest=4, short=3) == [Chunk(((0, 0, 1), (1, 0, 2), (2, 0, 1)), 0)]
    assert deal([0, 0], 2, largest=4, smallest=1, short=3) == []


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("lengths", [[1], [100], [7, 0, 3, 250, 4], [5] * 200, [99] * 3])
def test_every_element_is_in_one_chunk_that_fits_a_slot(ranks: int, lengths: list[int]) -> None:
    chunks = deal(lengths, ranks, largest=16, smallest=4, short=16)
    found = sorted((tensor, each) for chunk in chunks for tensor, a, b in chunk.runs for each in range(a, b))
    assert found == [(tensor, each) for tensor, length in enumerate(lengths) for each in range(length)]
    assert all(chunk.elements <= 16 for chunk in chunks)
    assert [chunk.owner for chunk in chunks] == [number % ranks for number in range(len(chunks))]


def test_owners_that_are_given_are_busy_at_once() -> None:
    assert assign([8, 5, 6], [1, 0, 1], 5) == [
        Chunk(((1, 0, 5),), 0),
        Chunk(((0, 0, 5),), 1),
        Chunk(((0, 5, 8),), 1),
        Chunk(((2, 0, 5),), 1),
        Chunk(((2, 5, 6),), 1),
    ]
    assert assign([], [], 5) == []


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
