"""alltoall: every rank gets the rows meant for it, in rank order, for every dtype, layout and division."""

from types import ModuleType

import pytest
import torch
from support.collectives.inputs import DTYPES, LAYOUTS, contribution
from torch import Tensor


def splits_of(hvd: ModuleType, source: int) -> list[int]:
    """Uneven, some of them 0."""
    return [(source + 2 * target) % 4 for target in range(hvd.size())]


def rows_of(hvd: ModuleType, source: int, trailing: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """As many rows as `source` sends, and one that nobody gets."""
    return contribution(source, (sum(splits_of(hvd, source)) + 1, *trailing), dtype)


def expected(hvd: ModuleType, trailing: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, list[int]]:
    """What must come to this rank, and how much from each."""
    parts = []
    for source in range(hvd.size()):
        splits = splits_of(hvd, source)
        parts.append(rows_of(hvd, source, trailing, dtype)[: sum(splits)].split(splits)[hvd.rank()])
    return torch.cat(parts), [len(part) for part in parts]


@pytest.mark.parametrize("trailing", [(), (3,), (2, 0, 2), (2, 3)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_uneven_splits(hvd: ModuleType, dtype: torch.dtype, trailing: tuple[int, ...]) -> None:
    mine = rows_of(hvd, hvd.rank(), trailing, dtype)
    kept = mine.clone()
    right, counts = expected(hvd, trailing, dtype)
    output, received = hvd.alltoall(mine, splits=splits_of(hvd, hvd.rank()))
    assert output.dtype is dtype
    assert torch.equal(output, right)
    assert received.tolist() == counts
    assert torch.equal(mine, kept)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(hvd: ModuleType, layout: object) -> None:
    assert callable(layout)
    mine = contribution(hvd.rank(), (2 * hvd.size(), 3, 4, 5), torch.float32)
    every = [contribution(rank, (2 * hvd.size(), 3, 4, 5), torch.float32) for rank in range(hvd.size())]
    given = layout(mine)
    assert torch.equal(hvd.alltoall(given), torch.cat([each.split(2)[hvd.rank()] for each in every]))
    assert torch.equal(given, mine)


def test_without_splits_only_the_rows_are_returned(hvd: ModuleType) -> None:
    # Rank r sends r + 1 rows to everybody.
    mine = torch.full((hvd.size() * (hvd.rank() + 1), 2), float(hvd.rank()))
    right = torch.cat([torch.full((rank + 1, 2), float(rank)) for rank in range(hvd.size())])
    assert torch.equal(hvd.alltoall(mine), right)
    output, received = hvd.synchronize(hvd.alltoall_async(mine, name="rows"))
    assert torch.equal(output, right)
    assert received.tolist() == [rank + 1 for rank in range(hvd.size())]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_splits_may_be_a_tensor(hvd: ModuleType, dtype: torch.dtype) -> None:
    splits = torch.tensor(splits_of(hvd, hvd.rank()), dtype=dtype)
    right, counts = expected(hvd, (3,), torch.float32)
    output, received = hvd.alltoall(rows_of(hvd, hvd.rank(), (3,), torch.float32), splits)
    assert torch.equal(output, right)
    assert received.dtype is dtype
    assert received.tolist() == counts


def test_some_ranks_give_splits_and_others_do_not(hvd: ModuleType) -> None:
    mine = torch.arange(hvd.size()) + 10 * hvd.rank()
    splits = [1] * hvd.size() if hvd.rank() % 2 else None
    result = hvd.alltoall(mine, splits, name="mixed")
    output = result if splits is None else result[0]
    assert output.tolist() == [10 * rank + hvd.rank() for rank in range(hvd.size())]


def test_nothing_at_all(hvd: ModuleType) -> None:
    output, received = hvd.alltoall(torch.empty(0, 4), splits=[0] * hvd.size())
    assert output.shape == (0, 4)
    assert received.tolist() == [0] * hvd.size()


def test_everything_to_one_rank(hvd: ModuleType) -> None:
    for target in range(hvd.size()):
        splits = [0] * hvd.size()
        splits[target] = 100_000
        output, received = hvd.alltoall(torch.full((100_000,), hvd.rank()), splits)
        if hvd.rank() == target:
            assert torch.equal(output, torch.arange(hvd.size()).repeat_interleave(100_000))
        else:
            assert len(output) == 0
            assert received.tolist() == [0] * hvd.size()


def test_many_in_flight_in_any_order(hvd: ModuleType) -> None:
    numbers = list(range(12))
    handles = {
        number: hvd.alltoall_async(torch.full((hvd.size(), 50 * number), 100.0 * number + hvd.rank()), name=str(number))
        for number in (numbers if hvd.rank() % 2 else reversed(numbers))
    }
    for number in numbers:
        output, _ = hvd.synchronize(handles[number])
        rows = [torch.full((50 * number,), 100.0 * number + rank) for rank in range(hvd.size())]
        assert torch.equal(output, torch.stack(rows))
