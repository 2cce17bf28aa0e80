"""World: who the ranks are, for every way to name them; the user's own MPI stays untouched, forks are refused."""

import logging
import multiprocessing
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
from support.children import raised_in_child

from hvlike.errors import LaunchError, UsageError
from hvlike.transport.failure import guard
from hvlike.transport.host import mpi_library
from hvlike.transport.world import World

pytestmark = [pytest.mark.differs_by_ranks(2, 4), pytest.mark.rests_on_mpi]


@pytest.fixture(autouse=True)
def no_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process of the tests is not to be watched after them."""
    monkeypatch.setattr(guard, "watch_start", lambda: None)


@pytest.fixture
def mpi() -> ModuleType:
    return mpi_library.load_mpi()


def total(world: World) -> int:
    """Sum of 1 over the ranks of a world: works only if all take part."""
    return int(world.comm.allreduce(1))


def test_all_ranks(mpi: ModuleType) -> None:
    world = World.start()
    assert (world.rank, world.size) == (mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size())
    assert total(world) == world.size
    assert sorted(rank for node in world.nodes for rank in node) == list(range(world.size))
    assert world.nodes[0][0] == 0
    assert world.local_size == world.node_comm.Get_size()
    assert world.local_rank == world.node_comm.Get_rank()
    assert world.thread_level >= mpi.THREAD_SERIALIZED
    assert str(world) == f"rank {world.rank} of {world.size} on {world.host}"
    world.close()


def test_errors_raise_instead_of_ending_the_job(mpi: ModuleType) -> None:
    world = World.start()
    assert world.comm.Get_errhandler() == mpi.ERRORS_RETURN
    with pytest.raises(mpi.Exception):
        world.comm.Send(bytearray(1), dest=world.size)
    world.close()


def test_a_list_gives_the_order_of_ranks(mpi: ModuleType) -> None:
    size = mpi.COMM_WORLD.Get_size()
    world = World.start(list(reversed(range(size))))
    assert world.rank == size - 1 - mpi.COMM_WORLD.Get_rank()
    assert total(world) == size
    world.close()


def test_a_list_of_one(mpi: ModuleType) -> None:
    world = World.start([mpi.COMM_WORLD.Get_rank()])
    assert (world.rank, world.size, world.nodes) == (0, 1, ((0,),))
    world.close()


def test_a_communicator_is_duplicated_and_stays_the_users(mpi: ModuleType) -> None:
    user = mpi.COMM_WORLD.Split(mpi.COMM_WORLD.Get_rank() % 2)
    world = World.start(user)
    assert world.size == user.Get_size() == total(world)
    assert world.comm != user
    world.close()
    assert user.allreduce(1) == user.Get_size()
    user.Free()


def test_nodes_can_be_split_for_trials() -> None:
    world = World.start(ranks_per_node=2)
    ranks = list(range(world.size))
    assert world.nodes == tuple(tuple(ranks[first : first + 2]) for first in range(0, world.size, 2))
    assert world.local_rank == world.rank % 2
    assert world.cross_rank == world.rank // 2
    assert world.homogeneous is (world.size % 2 == 0 or world.size == 1)
    assert world.node_comm.Get_size() == world.local_size
    world.close()


def test_wrong_lists(mpi: ModuleType) -> None:
    rank, size = mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()
    with pytest.raises(UsageError, match=rf"ranks \[{size}\], but the job has ranks 0 to {size - 1}"):
        World.start([rank, size])
    with pytest.raises(UsageError, match=r"ranks \[-1\]"):
        World.start([-1, rank])
    with pytest.raises(UsageError, match=rf"ranks \[{rank}\] more than once"):
        World.start([rank, rank])
    with pytest.raises(UsageError, match="pass None for all ranks"):
        World.start([])


@pytest.mark.mpi(min_size=2)
def test_a_list_without_the_calling_rank(mpi: ModuleType) -> None:
    rank = mpi.COMM_WORLD.Get_rank()
    with pytest.raises(UsageError, match=f"rank {rank} called init.* a list without itself"):
        World.start([(rank + 1) % mpi.COMM_WORLD.Get_size()])


def test_a_null_communicator(mpi: ModuleType) -> None:
    with pytest.raises(UsageError, match="COMM_NULL"):
        World.start(mpi.COMM_NULL)


@pytest.mark.mpi(min_size=2)
def test_an_intercommunicator(mpi: ModuleType) -> None:
    side = mpi.COMM_WORLD.Get_rank() % 2
    half = mpi.COMM_WORLD.Split(side)
    bridge = half.Create_intercomm(0, mpi.COMM_WORLD, 1 - side)
    with pytest.raises(UsageError, match="intercommunicator"):
        World.start(bridge)
    bridge.Free()
    half.Free()


class Touching(logging.Handler):
    """Makes a file when something is logged."""

    def __init__(self, file: Path) -> None:
        super().__init__(logging.WARNING)
        self.file = file

    def emit(self, record: logging.LogRecord) -> None:
        self.file.touch()


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_waits_in_init_says_so(mpi: ModuleType, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    rank, size = mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()
    late = rank == 1
    folder = Path(mpi.COMM_WORLD.bcast(str(tmp_path), root=1))
    logger = logging.getLogger()
    # After the one of caplog: when the late rank sees the file, the text is there.
    logger.addHandler(heard := Touching(folder / str(rank)))
    with caplog.at_level(logging.WARNING, logger="hvlike"):
        end = time.monotonic() + 60
        while late and len(list(folder.iterdir())) < size - 1 and time.monotonic() < end:
            time.sleep(0.01)
        world = World.start(patience=0.05)
    logger.removeHandler(heard)
    assert late or f"rank {world.rank} of {world.size} on {world.host} has waited" in caplog.text
    world.close()


def test_a_spawned_child_of_a_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object())
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(LaunchError, match="child that multiprocessing started from a rank"):
        World.start()


def test_a_grandchild_is_refused_too() -> None:
    mpi_library.load_mpi()

    def refuse_grandchild() -> None:
        raise RuntimeError(raised_in_child(mpi_library.check_not_forked))

    assert "ForkedProcessError" in raised_in_child(refuse_grandchild)


def test_a_child_forked_before_mpi_started_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    assert raised_in_child(mpi_library.check_not_forked) == ""
