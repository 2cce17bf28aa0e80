"""Operations among some of the ranks, registered by init(process_sets=...)."""

from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

from hvlike import ProcessSet
from hvlike.errors import ShapeMismatchError, UsageError

pytestmark = pytest.mark.mpi(min_size=3)


class Sets(NamedTuple):
    hvd: ModuleType
    even: ProcessSet
    odd: ProcessSet
    last: ProcessSet

    @property
    def mine(self) -> ProcessSet:
        return self.odd if self.hvd.rank() % 2 else self.even

    def ranks(self) -> list[int]:
        """The ranks of this rank's set."""
        return list(range(self.hvd.rank() % 2, self.hvd.size(), 2))


@pytest.fixture(scope="module")
def sets(hvd: ModuleType) -> Iterator[Sets]:
    """Even ranks, odd ranks, and the last rank with rank 1; back to a job without sets afterwards."""
    size = hvd.size()
    hvd.shutdown()
    even, odd = ProcessSet(range(0, size, 2)), ProcessSet(range(1, size, 2))
    last = ProcessSet([size - 1, 1, 2]) if size > 3 else ProcessSet([size - 1])
    hvd.init(process_sets=[even, odd, last] if size > 2 else [even, odd])
    yield Sets(hvd, even, odd, last)
    hvd.shutdown()
    assert even.process_set_id is None
    hvd.init()


def test_who_is_in_a_set(sets: Sets) -> None:
    hvd = sets.hvd
    assert (sets.even.process_set_id, sets.odd.process_set_id) == (1, 2)
    assert sets.mine.included()
    assert sets.mine.size() == len(sets.ranks())
    assert sets.mine.rank() == hvd.rank() // 2
    other = sets.even if sets.mine is sets.odd else sets.odd
    assert not other.included()
    with pytest.raises(ValueError, match="Process is not part of provided process set"):
        other.rank()
    assert hvd.global_process_set.process_set_id == 0
    assert hvd.global_process_set.ranks == list(range(hvd.size()))
    assert hvd.global_process_set.rank() == hvd.rank()


def test_sets_and_the_job_at_once_under_one_name(sets: Sets) -> None:
    hvd = sets.hvd
    calls = [None, sets.mine, hvd.global_process_set]
    if hvd.rank() % 2:
        calls.reverse()
    mine = torch.tensor([float(hvd.rank())])
    names = {None: "x", sets.mine: "x", hvd.global_process_set: "y"}
    handles = {each: hvd.allreduce_async(mine, name=names[each], op=hvd.Sum, process_set=each) for each in calls}
    assert hvd.synchronize(handles[sets.mine]).item() == sum(sets.ranks())
    assert hvd.synchronize(handles[None]).item() == sum(range(hvd.size()))
    assert hvd.synchronize(handles[hvd.global_process_set]).item() == sum(range(hvd.size()))


def test_unnamed_operations_of_a_set_do_not_count_in_the_job(sets: Sets) -> None:
    hvd = sets.hvd
    if hvd.rank() % 2:
        for _ in range(3):
            hvd.allreduce(torch.ones(1), process_set=sets.odd)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def test_a_rank_outside_is_refused(sets: Sets) -> None:
    hvd = sets.hvd
    other = sets.even if sets.mine is sets.odd else sets.odd
    text = f"Allreduce: Rank {hvd.rank()} is not a member of the provided process set"
    with pytest.raises(UsageError, match=text):
        hvd.allreduce(torch.ones(1), process_set=other)
    for call in (hvd.allgather, hvd.alltoall, hvd.reducescatter, hvd.grouped_allgather, hvd.grouped_reducescatter):
        with pytest.raises(UsageError, match=text.partition(": ")[2]):
            call(torch.ones(2), process_set=other)
    with pytest.raises(UsageError, match="broadcast received invalid root rank"):
        hvd.broadcast(torch.ones(1), root_rank=(other.ranks or [])[0], process_set=sets.mine)
    hvd.barrier()


def test_a_mismatch_within_a_set_names_the_ranks_of_the_job(sets: Sets) -> None:
    hvd, ranks = sets.hvd, sets.ranks()
    if len(ranks) > 1:
        with pytest.raises(ShapeMismatchError, match=rf"rank {ranks[-1]} passed \[{ranks[-1] + 1}\]"):
            hvd.allreduce(torch.ones(hvd.rank() + 1), process_set=sets.mine)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=sets.mine).item() == len(ranks)
    hvd.barrier()


def test_the_gradient_stays_within_the_set(sets: Sets) -> None:
    hvd = sets.hvd
    leaf = torch.ones(3, requires_grad=True)
    hvd.allreduce(leaf, op=hvd.Sum, process_set=sets.mine).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [len(sets.ranks())] * 3
    root = sets.ranks()[0]
    other = torch.ones(3, requires_grad=True)
    hvd.broadcast(other, root, process_set=sets.mine).sum().backward()
    assert other.grad is not None
    assert other.grad.tolist() == [len(sets.ranks()) if hvd.rank() == root else 0] * 3


def test_gradients_of_rows_and_sparse_sums_stay_within_the_set(sets: Sets) -> None:
    hvd, mine, ranks = sets.hvd, sets.mine, sets.ranks()
    size = len(ranks)
    sparse = hvd.sparse_allreduce_async(torch.eye(2).to_sparse(), op=hvd.Sum, process_set=mine)()
    assert sparse.to_dense().tolist() == [[size, 0], [0, size]]
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
