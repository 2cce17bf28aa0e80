"""allgather, alltoall, reducescatter and sparse sums among some of the ranks: positions count within the set."""

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from hvlike import ProcessSet
from hvlike.errors import UsageError

pytestmark = pytest.mark.mpi(min_size=3)


@pytest.fixture(scope="module")
def parts(hvd: ModuleType) -> Iterator[tuple[ProcessSet, ProcessSet]]:
    """The set of this rank (first and last, or those between), and the other one."""
    ends = hvd.add_process_set([0, hvd.size() - 1])
    between = hvd.add_process_set(list(range(1, hvd.size() - 1)))
    yield (ends, between) if ends.included() else (between, ends)
    for each in (ends, between):
        hvd.remove_process_set(each)


def test_rows_of_the_members_in_their_order(hvd: ModuleType, parts: tuple[ProcessSet, ProcessSet]) -> None:
    mine, _ = parts
    ranks, size = mine.ranks or [], mine.size() or 0
    assert hvd.allgather(torch.tensor(hvd.rank()), process_set=mine).tolist() == ranks
    assert hvd.grouped_allgather([torch.tensor([hvd.rank()])], process_set=mine)[0].tolist() == ranks
    assert hvd.alltoall(torch.full((size,), hvd.rank()), process_set=mine).tolist() == ranks
    output, received = hvd.alltoall(torch.full((3 * size,), hvd.rank()), [3] * size, process_set=mine)
    assert output.tolist() == [rank for rank in ranks for _ in range(3)]
    assert received.tolist() == [3] * size
    total = hvd.reducescatter(torch.arange(2 * size) + hvd.rank(), op=hvd.Sum, process_set=mine)
    first = 2 * (mine.rank() or 0)
    assert total.tolist() == [size * row + sum(ranks) for row in (first, first + 1)]
    sparse = hvd.sparse_allreduce_async(torch.eye(2).to_sparse(), op=hvd.Sum, process_set=mine)()
    assert sparse.to_dense().tolist() == [[size, 0], [0, size]]


def test_gradients_stay_within_the_set(hvd: ModuleType, parts: tuple[ProcessSet, ProcessSet]) -> None:
    mine, _ = parts
    ranks, size = mine.ranks or [], mine.size() or 0
    calls = {
        "allgather": (lambda rows: hvd.allgather(rows, process_set=mine), [sum(ranks)] * size),
        "alltoall": (lambda rows: hvd.alltoall(rows, process_set=mine), ranks),
        "reducescatter": (lambda rows: hvd.reducescatter(rows, op=hvd.Sum, process_set=mine), ranks),
    }
    for call, expected in calls.values():
        leaf = torch.ones(size, requires_grad=True)
        (call(leaf) * hvd.rank()).sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.tolist() == expected


def test_disjoint_sets_and_the_job_at_once(hvd: ModuleType, parts: tuple[ProcessSet, ProcessSet]) -> None:
    mine, _ = parts
    for _ in range(3):
        whole = hvd.allgather_async(torch.full((1000,), hvd.rank()), name="rows")
        part = hvd.allgather_async(torch.full((1000,), hvd.rank()), name="rows", process_set=mine)
        assert hvd.synchronize(part)[::1000].tolist() == mine.ranks
        assert hvd.synchronize(whole)[::1000].tolist() == list(range(hvd.size()))


def test_a_rank_outside_is_refused(hvd: ModuleType, parts: tuple[ProcessSet, ProcessSet]) -> None:
    _, other = parts
    rows = torch.ones(2)
    text = f"Rank {hvd.rank()} is not a member of the provided process set"
    for call in (hvd.allgather, hvd.alltoall, hvd.reducescatter, hvd.grouped_allgather, hvd.grouped_reducescatter):
        with pytest.raises(UsageError, match=text):
            call(rows, process_set=other)
