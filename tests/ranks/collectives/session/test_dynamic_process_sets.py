"""Process sets that are added and removed after init(), and what they pickle as."""

import copy
import gc
import os
import pickle
from types import ModuleType

import pytest
import torch

from hvlike import ProcessSet
from hvlike.errors import MismatchError, ShutdownError

pytestmark = [pytest.mark.differs_by_ranks(2), pytest.mark.rests_on_mpi]


def test_a_set_of_ranks_works_until_it_is_removed(hvd: ModuleType) -> None:
    ranks = list(range(0, hvd.size(), 2))
    if len(ranks) == hvd.size():
        pytest.skip("every rank is even here: that is the global set")
    added = hvd.add_process_set(ranks)
    assert added.ranks == ranks
    assert added.included() == (hvd.rank() in ranks)
    if hvd.rank() in ranks:
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum, process_set=added).tolist() == [len(ranks)] * 2
        assert hvd.broadcast_object({"from": hvd.rank()}, root_rank=ranks[-1], process_set=added) == {"from": ranks[-1]}
    else:
        with pytest.raises(ValueError, match=f"Rank {hvd.rank()} is not a member of the provided process set"):
            hvd.allreduce(torch.ones(2), process_set=added)
    assert hvd.remove_process_set(added) is True
    assert added.process_set_id is None
    with pytest.raises(ValueError, match="does not exist, or has not been registered"):
        hvd.allreduce(torch.ones(2), process_set=added)
    assert hvd.remove_process_set(added) is False


@pytest.mark.mpi(min_size=2)
def test_a_removed_set_can_be_added_again_under_a_new_number(hvd: ModuleType) -> None:
    only = hvd.ProcessSet([1])
    first = hvd.add_process_set(only).process_set_id
    hvd.remove_process_set(only)
    assert hvd.add_process_set(only) is only
    assert only.process_set_id != first
    hvd.remove_process_set(only)


@pytest.mark.mpi(min_size=2)
def test_a_communicator_of_mpi4py_names_the_ranks(hvd: ModuleType) -> None:
    from mpi4py import MPI

    members = MPI.COMM_WORLD.Get_group()
    some = members.Incl([0])
    # Only its members have a communicator; the others name the same ranks.
    comm = MPI.COMM_WORLD.Create_group(some) if hvd.rank() == 0 else MPI.COMM_NULL
    added = hvd.add_process_set(hvd.ProcessSet(comm) if hvd.rank() == 0 else [0])
    assert added.ranks == [0]
    hvd.remove_process_set(added)
    if hvd.rank() == 0:
        comm.Free()
    some.Free()
    members.Free()


def test_the_global_set_stays(hvd: ModuleType) -> None:
    assert hvd.remove_process_set(hvd.global_process_set) is False
    with pytest.raises(ValueError, match="duplicate process set"):
        hvd.add_process_set(range(hvd.size()))


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([0, 1000], "names rank 1000, but the job has ranks 0 to"), ([-1], "none negative"), ("all", "list of process")],
)
def test_a_set_that_cannot_be_is_refused_on_every_rank(hvd: ModuleType, ranks: object, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        hvd.add_process_set(ranks)
    hvd.barrier()


@pytest.mark.mpi(min_size=2)
def test_ranks_that_name_different_sets_all_get_an_error(hvd: ModuleType) -> None:
    with pytest.raises(MismatchError, match=r"rank 0 passed add \[0\].*passed add \[1\]"):
        hvd.add_process_set([0] if hvd.rank() == 0 else [1])
    with pytest.raises(MismatchError, match="same process set on every rank"):
        hvd.add_process_set([0, 1000] if hvd.rank() == 0 else [1])
    hvd.barrier()


@pytest.mark.mpi(min_size=3)
def test_what_is_in_flight_in_a_removed_set_ends_with_an_error(hvd: ModuleType) -> None:
    pair = hvd.add_process_set([0, 1])
    handle = hvd.allreduce_async(torch.ones(2), name="never", process_set=pair) if hvd.rank() == 0 else None
    hvd.remove_process_set(pair)
    if handle is not None:
        with pytest.raises(ShutdownError, match="was removed"):
            hvd.synchronize(handle)


@pytest.mark.mpi(min_size=3)
def test_many_sets_come_and_go_and_leave_nothing(hvd: ModuleType) -> None:
    def once() -> None:
        added = hvd.add_process_set([0, 1])
        if hvd.rank() < 2:
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=added).item() == 2
        hvd.remove_process_set(added)

    def held() -> tuple[int, int]:
        gc.collect()
        with open("/proc/self/maps") as maps:
            return len(os.listdir("/proc/self/fd")), sum(1 for line in maps if "memfd" in line or "/dev/shm" in line)

    for _ in range(3):
        once()
    before = held()
    for _ in range(150):
        once()
    assert held() == before


def test_a_registered_set_comes_back_as_itself(hvd: ModuleType) -> None:
    assert pickle.loads(pickle.dumps(hvd.global_process_set)) is hvd.global_process_set
    assert copy.deepcopy(hvd.global_process_set) is hvd.global_process_set


def test_another_set_comes_back_with_its_ranks() -> None:
    restored = pickle.loads(pickle.dumps(ProcessSet([500, 400])))
    assert restored.ranks == [400, 500]
    assert restored.process_set_id is None
