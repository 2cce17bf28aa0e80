"""Work that is cut: shards, messages, chunks and packed tensors, by tables and the laws they follow for any lengths."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.backends.base import SoloBackend
from hvlike.backends.fusion_buffer import SMALL_BYTES, FusionBuffer, small_ones
from hvlike.backends.network.partition import PacketSizes, Run, message_length, messages, packets_of, shards
from hvlike.backends.shared_memory.schedule import (
    CHUNK_BYTES,
    SMALLEST_CHUNK_BYTES,
    Chunk,
    assign,
    chunk_bytes,
    cut_together,
    deal,
)
from hvlike.transport.loop.coroutine import Coroutine

LENGTHS = st.lists(st.integers(0, 40), max_size=8)


@given(LENGTHS, st.integers(1, 7), st.integers(1, 20))
def test_every_element_travels_once_in_order(lengths: list[int], count: int, elements: int) -> None:
    runs = [run for shard in shards(lengths, count) for message in messages(shard, elements) for run in message]
    visited = [(piece, index) for piece, start, stop in runs for index in range(start, stop)]
    assert visited == [(piece, index) for piece, length in enumerate(lengths) for index in range(length)]
    assert all(start < stop for _, start, stop in runs)


@given(LENGTHS, st.integers(1, 7), st.integers(1, 20))
def test_shards_are_balanced_and_messages_full(lengths: list[int], count: int, elements: int) -> None:
    cut = shards(lengths, count)
    sizes = [message_length(shard) for shard in cut]
    assert max(sizes) - min(sizes) <= 1
    for shard in cut:
        *full, last = [message_length(message) for message in messages(shard, elements)] or [1]
        assert all(length == elements for length in full)
        assert 0 < last <= elements


@pytest.mark.parametrize(
    ("lengths", "early", "expected"),
    [
        ([2, 30, 3], 40, ([[(0, 0, 2), (2, 0, 2)], [(2, 2, 3)]], [[(1, 0, 15)], [(1, 15, 30)]])),
        ([9, 9], 40, ([[(0, 0, 4)], [(0, 4, 9), (1, 0, 3)], [(1, 3, 9)]], [])),
        ([12], 40, ([], [[(0, 0, 12)]])),
        # The first 40 elements of long runs in messages of 15, the rest in messages of 20.
        ([50, 10], 40, ([], [[(0, 0, 15)], [(0, 15, 30)], [(0, 30, 40)], [(0, 40, 50)], [(1, 0, 10)]])),
        # Without early messages they are cut as long as can be.
        ([50, 3], 0, ([[(1, 0, 3)]], [[(0, 0, 20)], [(0, 20, 40)], [(0, 40, 50)]])),
        ([], 40, ([], [])),
    ],
)
def test_short_runs_are_packed_and_long_ones_travel_alone(lengths: list[int], early: int, expected: object) -> None:
    runs = [Run(index, 0, length) for index, length in enumerate(lengths)]
    sizes = PacketSizes(short=10, first=4, packed=8, early=early, eager=15, largest=20)
    assert packets_of(runs, sizes) == expected


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


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([], []),
        ([5], []),  # one alone gains nothing from a copy
        ([5, 6], [0, 1]),
        ([5, SMALL_BYTES // 4, 6], [0, 2]),
        ([0, 5, 6], [1, 2]),
        ([SMALL_BYTES // 4] * 3, []),
    ],
)
def test_small_tensors_are_found(lengths: list[int], expected: list[int]) -> None:
    assert small_ones(lengths, 4) == expected


class RecordingBackend(SoloBackend):
    """Notes what it is asked to reduce."""

    def __init__(self) -> None:
        self.lengths: list[list[int]] = []

    def allreduce(self, tensors: list[torch.Tensor], arithmetic: Arithmetic) -> Coroutine[None]:  # type: ignore[override]
        self.lengths.append([len(tensor) for tensor in tensors])
        yield from super().allreduce(tensors, arithmetic)


def run(coroutine: Coroutine[None]) -> None:
    for _ in coroutine:
        pass


def test_results_come_back_into_the_tensors_and_the_buffer_follows_changed_lengths() -> None:
    backend, packer = RecordingBackend(), FusionBuffer()
    double = Arithmetic(torch.float32, ReduceOp.SUM, postscale=2.0)
    for lengths in ([3, 70_000, 5], [3, 70_000, 5], [4, 4]):
        tensors = [torch.full((length,), float(length)) for length in lengths]
        run(packer.allreduce(backend, tensors, double))
        for tensor, length in zip(tensors, lengths, strict=True):
            assert torch.equal(tensor, torch.full((length,), 2.0 * length))
    assert backend.lengths == [[8, 70_000], [8, 70_000], [8]]
