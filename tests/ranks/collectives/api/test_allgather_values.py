"""allgather stacks the rows of all ranks in rank order, for every dtype, also where their numbers differ."""

from types import ModuleType

import pytest
import torch
from support.collectives.inputs import DTYPES, LAYOUTS, chunk_shapes, contribution

from hvlike.collectives.api.gather_scatter import allgather, allgather_async


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_all_ranks_in_rank_order(hvd: ModuleType, dtype: torch.dtype) -> None:
    for trailing in ((), (3,), (2, 0, 2), (2, 3)):
        # Rank 0 has no row, rank 1 one, ...
        parts = [contribution(rank, (rank, *trailing), dtype) for rank in range(hvd.size())]
        assert torch.equal(allgather(parts[hvd.rank()]), torch.cat(parts))
        assert torch.equal(hvd.synchronize(allgather_async(parts[hvd.rank()])), torch.cat(parts))


def test_a_scalar_is_one_row(hvd: ModuleType) -> None:
    assert allgather(torch.tensor(hvd.rank())).tolist() == list(range(hvd.size()))


def test_nobody_has_a_row(hvd: ModuleType) -> None:
    assert allgather(torch.empty(0, 4)).shape == (0, 4)


def test_sizes_around_a_chunk(hvd: ModuleType) -> None:
    for shape in chunk_shapes(torch.float32):
        parts = [contribution(rank, (shape[0] - rank,), torch.float32) for rank in range(hvd.size())]
        assert torch.equal(allgather(parts[hvd.rank()]), torch.cat(parts))


def test_every_layout(hvd: ModuleType) -> None:
    for layout in LAYOUTS:
        parts = [contribution(rank, (rank + 1, 3, 4, 5), torch.float32) for rank in range(hvd.size())]
        given = layout(parts[hvd.rank()])
        assert torch.equal(allgather(given), torch.cat(parts))
        assert torch.equal(given, parts[hvd.rank()])
    row = torch.full((1, 2), float(hvd.rank()))
    expected = torch.cat([torch.full((3, 2), float(rank)) for rank in range(hvd.size())])
    assert torch.equal(allgather(row.expand(3, 2)), expected)


@pytest.mark.parametrize("waits", [True, False], ids=["blocking", "async"])
def test_a_group_of_mixed_tensors(hvd: ModuleType, waits: bool) -> None:
    every = [
        [
            contribution(rank, (rank, 3), torch.float32),
            contribution(rank, (), torch.int64),
            contribution(rank, (2, 2), torch.bool),
            contribution(rank, (3 - min(rank, 3), 0), torch.bfloat16),
        ]
        for rank in range(hvd.size())
    ]
    given = every[hvd.rank()]
    results = hvd.grouped_allgather(given) if waits else hvd.synchronize(hvd.grouped_allgather_async(given))
    assert isinstance(results, list)
    for index, result in enumerate(results):
        right = torch.cat([torch.atleast_1d(tensors[index]) for tensors in every])
        assert result.dtype is right.dtype
        assert torch.equal(result, right)


def test_many_in_flight_in_any_order(hvd: ModuleType) -> None:
    numbers = list(range(12))
    handles = {
        number: hvd.allgather_async(torch.full((hvd.rank() + number, 5), float(number)), name=str(number))
        for number in (numbers if hvd.rank() % 2 else reversed(numbers))
    }
    for number in numbers:
        rows = sum(rank + number for rank in range(hvd.size()))
        assert torch.equal(hvd.synchronize(handles[number]), torch.full((rows, 5), float(number)))
