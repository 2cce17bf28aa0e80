"""init and shutdown in every order, for all ranks or some, beside the user's own MPI; the session goes on as before."""

from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch
from support.children import raised_in_child

from hvlike.errors import HorovodInternalError, NotInitializedError, UsageError

pytestmark = [pytest.mark.differs_by_ranks(2), pytest.mark.rests_on_mpi]


@pytest.fixture
def stopped(hvd: ModuleType) -> Iterator[ModuleType]:
    """hvlike shut down; running on all ranks again afterwards."""
    hvd.shutdown()
    yield hvd
    hvd.shutdown()
    hvd.init()
    works(hvd)


def works(hvd: ModuleType) -> None:
    """All ranks of the running job reduce together."""
    mine = torch.tensor([1.0, hvd.rank()])
    assert hvd.allreduce(mine, op=hvd.Sum).tolist() == [hvd.size(), sum(range(hvd.size()))]
    large = torch.full((200_000,), float(hvd.rank()))
    assert hvd.allreduce(large, op=hvd.Max)[-1] == hvd.size() - 1
    hvd.barrier()


def test_a_second_init_changes_nothing(hvd: ModuleType) -> None:
    before = (hvd.rank(), hvd.size())
    hvd.init()
    hvd.init(comm=[hvd.rank()])
    assert (hvd.rank(), hvd.size()) == before
    works(hvd)


def test_stop_and_start_again_and_again(stopped: ModuleType) -> None:
    for _ in range(3):
        assert not stopped.is_initialized()
        stopped.init()
        assert stopped.is_initialized()
        works(stopped)
        stopped.shutdown()
        stopped.shutdown()


QUESTIONS = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "is_homogeneous")
CALLS: dict[str, Callable[[ModuleType], object]] = {
    "allreduce": lambda hvd: hvd.allreduce(torch.ones(2)),
    "allreduce_async_": lambda hvd: hvd.allreduce_async_(torch.ones(2)),
    "grouped_allreduce": lambda hvd: hvd.grouped_allreduce([torch.ones(2)]),
    "broadcast": lambda hvd: hvd.broadcast(torch.ones(2), root_rank=0),
    "barrier": lambda hvd: hvd.barrier(),
}


def test_nothing_works_while_it_is_stopped(stopped: ModuleType) -> None:
    text = r"^hvlike: Horovod has not been initialized; use hvd\.init\(\)\."
    for question in (*QUESTIONS, "mpi_threads_supported"):
        with pytest.raises(ValueError, match=text):
            getattr(stopped, question)()
    for call in CALLS.values():
        with pytest.raises(HorovodInternalError, match=text) as raised:
            call(stopped)
        assert isinstance(raised.value, NotInitializedError)
    assert not stopped.is_initialized()


def test_ranks_and_nodes(hvd: ModuleType) -> None:
    assert 0 <= hvd.rank() < hvd.size()
    assert 0 <= hvd.local_rank() < hvd.local_size() <= hvd.size()
    assert 0 <= hvd.cross_rank() < hvd.cross_size() <= hvd.size()
    assert isinstance(hvd.is_homogeneous(), bool)
    assert isinstance(hvd.mpi_threads_supported(), bool)


@pytest.mark.parametrize("what", [3, "01", 1.5, [0, "1"], [0.5]], ids=repr)
def test_what_is_no_communicator_is_refused(stopped: ModuleType, what: object) -> None:
    with pytest.raises(ValueError, match=r"Invalid type of argument comm\. Expected list of rank integers or mpi4py"):
        stopped.init(what)
    assert not stopped.is_initialized()
    stopped.init()
    works(stopped)


def test_even_and_odd_ranks_apart(stopped: ModuleType) -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    mine = list(range(world.rank % 2, world.size, 2))
    stopped.init(comm=mine)
    assert (stopped.rank(), stopped.size()) == (world.rank // 2, len(mine))
    works(stopped)
    total = stopped.allreduce(torch.tensor(float(world.rank)), op=stopped.Sum)
    assert total == sum(mine)


def test_a_communicator_of_mpi4py(stopped: ModuleType) -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    # In reversed order; the first rank alone.
    comm = world.Split(0 if world.rank == 0 else 1, key=-world.rank)
    stopped.init(comm=comm)
    assert (stopped.rank(), stopped.size()) == (comm.rank, comm.size)
    works(stopped)
    gathered = stopped.broadcast(torch.tensor(world.rank), root_rank=0)
    assert gathered == (0 if world.rank == 0 else world.size - 1)
    stopped.shutdown()
    assert comm.allreduce(1) == comm.size, "it stays the caller's"
    comm.Free()


def test_messages_of_the_user_before_during_and_after(stopped: ModuleType) -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    early = [world.isend(("before", world.rank, tag), dest=right, tag=tag) for tag in (0, 1, 2)]
    stopped.init()
    handle = stopped.allreduce_async(torch.ones(100_000), op=stopped.Sum)
    during = world.isend("during", dest=right, tag=1)
    assert world.recv(source=MPI.ANY_SOURCE, tag=0) == ("before", left, 0)
    assert world.allreduce(world.rank) == sum(range(world.size))
    assert stopped.synchronize(handle)[-1] == world.size
    stopped.shutdown()
    assert [world.recv(source=left, tag=tag) for tag in (1, 1, 2)] == [
        ("before", left, 1),
        "during",
        ("before", left, 2),
    ]
    for request in (*early, during):
        request.wait()
    assert world.allgather(world.rank) == list(range(world.size))


def test_a_forked_child_is_refused(hvd: ModuleType) -> None:
    handle = hvd.allreduce_async(torch.ones(2), op=hvd.Sum)
    calls: list[Callable[[], object]] = [
        lambda: hvd.allreduce(torch.ones(2)),
        lambda: hvd.broadcast_(torch.ones(2), 0),
        hvd.barrier,
        hvd.init,
        hvd.shutdown,
    ]
    for call in calls:
        assert raised_in_child(call).startswith("ForkedProcessError: ")
    # The handle may have ended before the fork: then there is nothing left to wait for.
    said = raised_in_child(handle.wait)
    assert said == "" or said.startswith("ForkedProcessError: ")
    assert hvd.synchronize(handle).tolist() == [hvd.size()] * 2
    works(hvd)


@pytest.mark.mpi(min_size=2)
def test_different_process_sets_are_refused_on_every_rank(stopped: ModuleType) -> None:
    from mpi4py import MPI

    with pytest.raises(UsageError, match="rank 0 passed"):
        stopped.init(process_sets=[stopped.ProcessSet([MPI.COMM_WORLD.rank])])
    assert not stopped.is_initialized()
