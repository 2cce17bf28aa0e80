"""allgather stacks the rows of all ranks in rank order, for every dtype, also where their numbers differ."""

from types import ModuleType

import pytest
import torch
from collectives.inputs import DTYPES, LAYOUTS, chunk_shapes, contribution

from hvlike.collectives.allgather import allgather, allgather_async


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
