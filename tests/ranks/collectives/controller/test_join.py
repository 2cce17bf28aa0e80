"""hvd.join(): ranks without data are neutral to the others, and the job goes on when all have joined."""

import time
from types import ModuleType

import pytest
import torch
from support.adasum_reference import adasum
from torch import nn

from hvlike import DistributedOptimizer
from hvlike.errors import HorovodInternalError

pytestmark = [pytest.mark.differs_by_ranks(2), pytest.mark.rests_on_mpi]

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int64, torch.bool, torch.complex64)


def reference(op: str, values: list[torch.Tensor], size: int) -> torch.Tensor:
    """The reduction of what the active ranks pass; Average divides by all ranks."""
    wide = torch.stack(values)
    if values[0].dtype is torch.bool:
        return wide.any(0) if op in ("Sum", "Max") else wide.all(0)
    found = {
        "Sum": lambda: wide.sum(0),
        "Average": lambda: wide.sum(0) / size,
        "Min": lambda: wide.amin(0),
        "Max": lambda: wide.amax(0),
        "Product": lambda: wide.prod(0),
    }[op]()
    if not values[0].dtype.is_floating_point and not values[0].dtype.is_complex:
        found = found.trunc() if found.is_floating_point() else found
    return found.to(values[0].dtype)


def contribution(rank: int, dtype: torch.dtype) -> torch.Tensor:
    values = torch.tensor([rank + 1, -rank - 1, 2, 0])
    return values.bool() if dtype is torch.bool else values.to(dtype)


@pytest.mark.parametrize("op", ["Sum", "Average", "Min", "Max", "Product"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ranks_that_have_joined_are_neutral(hvd: ModuleType, op: str, dtype: torch.dtype) -> None:
    if (dtype is torch.bool and op == "Average") or (dtype.is_complex and op in ("Min", "Max")):
        pytest.skip("not defined")
    rank, size = hvd.rank(), hvd.size()
    # One rank fewer in every round, so that also a single rank is left.
    for round_ in range(size):
        if rank < size - round_:
            values = [contribution(each, dtype) for each in range(size - round_)]
            expected = reference(op, values, size)
            result = hvd.allreduce(values[rank], op=getattr(hvd, op), name=f"round {round_}")
            torch.testing.assert_close(result, expected, msg=f"{size - round_} active ranks")
            pair = hvd.grouped_allreduce([values[rank], values[rank]], op=getattr(hvd, op), name=f"pair {round_}")
            torch.testing.assert_close(pair, [expected, expected])
    assert hvd.join() in range(size)


def test_the_last_rank_is_the_result_everywhere(hvd: ModuleType) -> None:
    for last in range(hvd.size()):
        if hvd.rank() == last:
            # Ends when all others have joined.
            assert hvd.allreduce(torch.ones(1), name="alone", op=hvd.Sum).item() == 1
        assert hvd.join() == last


def test_factors_before_the_reduction_leave_it_neutral(hvd: ModuleType) -> None:
    if hvd.rank() == 0:
        tensor = torch.tensor([2.0, -3.0])
        size = hvd.size()
        assert hvd.allreduce(tensor, op=hvd.Min, prescale_factor=-2.0, name="a").tolist() == [-4.0, 6.0]
        assert hvd.allreduce(tensor, op=hvd.Max, prescale_factor=-2.0, name="b").tolist() == [-4.0, 6.0]
        assert hvd.allreduce(tensor, op=hvd.Max, prescale_factor=0.0, name="c").tolist() == [0.0, 0.0]
        assert hvd.allreduce(tensor, op=hvd.Product, postscale_factor=2.0, name="d").tolist() == [4.0, -6.0]
        if size > 1:
            with pytest.raises(HorovodInternalError, match="scale the tensor before the call"):
                hvd.allreduce(tensor, op=hvd.Product, prescale_factor=2.0, name="e")
    hvd.join()


def test_barriers_go_on(hvd: ModuleType) -> None:
    for _ in range(hvd.rank() * 2):
        hvd.barrier()
    hvd.join()
    hvd.barrier()


@pytest.mark.mpi(min_size=2)
def test_other_collectives_raise_on_the_active_ranks_and_the_job_goes_on(hvd: ModuleType) -> None:
    calls = {
        "Broadcast": lambda: hvd.broadcast(torch.ones(3), 0),
        "Allgather": lambda: hvd.allgather(torch.ones(3)),
        "Alltoall": lambda: hvd.alltoall(torch.ones(hvd.size())),
        "Reducescatter": lambda: hvd.reducescatter(torch.ones(hvd.size())),
    }
    for what, call in calls.items():
        if hvd.rank() > 0:
            with pytest.raises(
                HorovodInternalError, match=rf"rank 0 called hvd.join.*{what} is not supported with Join"
            ):
                call()
        hvd.join()
        call()
    if hvd.rank() > 0:
        with pytest.raises(HorovodInternalError, match=r"called hvd\.join"):
            hvd.add_process_set([0])
    hvd.join()


def test_unnamed_operations_are_aligned_afterwards(hvd: ModuleType) -> None:
    for _ in range(3 * hvd.rank()):
        hvd.allreduce(torch.ones(2))
    hvd.join()
    total = hvd.allreduce(torch.ones(2), op=hvd.Sum)
    assert total.tolist() == [hvd.size()] * 2
    assert hvd.allgather(torch.tensor([hvd.rank()])).tolist() == list(range(hvd.size()))


def test_what_was_submitted_before_joining_is_finished(hvd: ModuleType) -> None:
    names = [f"early {number}" for number in range(4)]
    handles = {name: hvd.allreduce_async(torch.ones(2), op=hvd.Sum, name=name) for name in names[: hvd.rank() + 1]}
    hvd.join()
    for number, name in enumerate(names):
        if name in handles:
            active = len([rank for rank in range(hvd.size()) if rank >= number])
            assert hvd.synchronize(handles[name]).tolist() == [active] * 2


@pytest.mark.mpi(min_size=3)
def test_join_holds_for_process_sets_too(hvd: ModuleType) -> None:
    pair = hvd.add_process_set([0, 1])
    if hvd.rank() == 1:
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum, process_set=pair).tolist() == [1.0, 1.0]
    hvd.join()
    if hvd.rank() < 2:
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum, process_set=pair).tolist() == [2.0, 2.0]
    assert hvd.remove_process_set(pair)


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("late", [False, True], ids=["joins first", "joins when they are stuck"])
def test_a_deadlock_of_the_active_ranks_is_theirs_alone(hvd: ModuleType, late: bool) -> None:
    rank, size = hvd.rank(), hvd.size()
    if rank == size - 1:
        time.sleep(0.7 * late)
    else:
        with pytest.raises(HorovodInternalError, match="no rank can go on"):
            hvd.allreduce(torch.ones(1), name=f"only on {rank}")
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="together").item() == size - 1
    hvd.join()


@pytest.mark.mpi(min_size=2)
def test_the_active_ranks_get_the_adasum_of_their_own(hvd: ModuleType) -> None:
    active = range(hvd.size() - 1)
    vectors = [torch.arange(6.0, dtype=torch.float64) - 2 * rank for rank in range(hvd.size())]
    if hvd.rank() in active:
        result = hvd.allreduce(vectors[hvd.rank()], name="uneven", op=hvd.Adasum)
        torch.testing.assert_close(result, adasum(vectors[:-1]))
    last = hvd.join()
    assert last == hvd.broadcast(torch.tensor(last), root_rank=0).item()


@pytest.mark.mpi(min_size=2)
def test_an_optimizer_goes_on_without_the_rank_that_has_joined(hvd: ModuleType) -> None:
    parameter = nn.Parameter(torch.ones(4, dtype=torch.float64))
    optimizer = DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), op=hvd.Adasum)

    def step() -> None:
        parameter.grad = torch.arange(4.0, dtype=torch.float64) - hvd.rank()
        optimizer.step()

    step()
    deltas = [rank - torch.arange(4.0, dtype=torch.float64) for rank in range(hvd.size())]
    expected = 1.0 + adasum(deltas)
    torch.testing.assert_close(parameter.detach(), expected)
    if hvd.rank() < hvd.size() - 1:
        step()
        torch.testing.assert_close(parameter.detach(), expected + adasum(deltas[:-1]))
    hvd.join()
