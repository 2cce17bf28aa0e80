"""The world and its groups: the ranks of a job, who they are and where they run. Owns hvlike's communicators.

A World duplicates the communicator it starts from, so no message of hvlike can meet one of the user's own mpi4py
code. Closing a World does not end MPI (a process can start MPI only once), so a World can be started, closed and
started again. A Group is some ranks of the world in rising order, with their positions on the nodes.
"""

from __future__ import annotations

import array
import dataclasses
import multiprocessing
import operator
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from hvlike.errors import LaunchError, UsageError, WrongTypeError
from hvlike.system.system import system
from hvlike.transport.failure import fault_tolerance, guard
from hvlike.transport.failure.fault_tolerance import RUNNING, Job
from hvlike.transport.failure.fault_tolerant_comm import failed_ranks
from hvlike.transport.failure.forked_child import watch_forks
from hvlike.transport.failure.loss_watch import LossWatch
from hvlike.transport.failure.watchdog import init_watchdog, start_watchdog
from hvlike.transport.host import launchers, mpi_library, topology
from hvlike.transport.host.spawned_children import keep_mpi_from_spawned

if TYPE_CHECKING:
    from mpi4py import MPI


_INVALID_COMM = "Invalid type of argument comm. Expected list of rank integers or mpi4py.MPI.Comm object."
# Open MPI sends messages with this tag on COMM_WORLD, where the user may receive too: an unlikely one.
_GROUP_TAG = 32_017


@dataclass(eq=False)
class World(topology.Topology):
    """The ranks that train together, seen from this one. Made by `World.start`."""

    mpi: ModuleType
    comm: Any  # MPI.Intracomm of all ranks, or what stands in for it (Job.adopt); private to hvlike, errors raise
    node_comm: Any  # The ranks that share memory with this one, in rank order
    rank: int
    size: int
    host: str
    thread_level: int  # MPI.THREAD_SERIALIZED or MPI.THREAD_MULTIPLE
    job: Job | None = None  # Under fault tolerance

    @classmethod
    def start(
        cls,
        comm: Sequence[int] | MPI.Comm | Job | None = None,
        *,
        ranks_per_node: int | None = None,
        patience: float = 60.0,
        limit: float = 0.0,
        serialized: bool = False,
        spares: int = 0,
        check: Callable[[MPI.Intracomm], None] | None = None,
    ) -> World:
        """Start MPI if it does not run yet and set up the communicators of hvlike. Blocks until every rank of `comm`
        has called it, and only these do.

        comm: None for all ranks; ranks of COMM_WORLD (rank i of the new world is the i-th of the list); or an
        intracommunicator of mpi4py, which is duplicated and stays the caller's; or a job that goes on with its
        survivors. ranks_per_node: split each real node
        into nodes of so many ranks, to try multi-node code on one machine. patience: seconds after which a rank that
        waits for the others says so in the log, again and again. limit: seconds after which it ends the job; 0: never.
        serialized: ask MPI for THREAD_SERIALIZED only. spares: how many of the last processes wait until a rank is
        lost; only under fault tolerance. check: called on every rank with the communicator of hvlike
        before anything follows from the arguments above; raises UsageError on every rank or on none.
        Raises: LaunchError, ForkedProcessError, UsageError, before anything is sent; what `check` raises, after that.
        """
        try:
            with init_watchdog(patience, limit, guard.give_up):
                mpi = _start_mpi(serialized=serialized)
                if ranks_per_node is not None and ranks_per_node < 1:
                    raise UsageError(f"ranks_per_node must be at least 1, got {ranks_per_node}.")
                job = None
                if isinstance(comm, Job) or fault_tolerance.is_enabled(os.environ):
                    job, private, node = _begin_job(mpi, comm, spares, check, ranks_per_node)
                else:
                    private = _make_private(mpi, _check_comm(mpi, comm))
                    if check is not None:
                        try:
                            check(private)
                        except UsageError:
                            private.Free()
                            raise
                    node = _split_by_node(mpi, private, ranks_per_node)
                private.Set_name("hvlike")
                _prime(private)
                rank = private.Get_rank()
                place = topology.describe_topology(_gather_node_ids(mpi, private, node), rank)
                _prime(node)
                if node.Get_rank() == 0 and system.mpi is None:
                    mpi_library.unlink_start_up_segments()
                return cls(
                    **vars(place),
                    mpi=mpi,
                    comm=private,
                    node_comm=node,
                    rank=rank,
                    size=private.Get_size(),
                    host=mpi.Get_processor_name(),
                    thread_level=mpi.Query_thread(),
                    job=job,
                )
        finally:
            # From here on, and above all when this failed: a rank that ends must not leave the others in their init().
            guard.watch_start()

    @property
    def on_first_node(self) -> bool:
        return self.rank in self.nodes[0]

    def adopt(self, comm: Any) -> Any:
        """What to use in the place of a communicator that was made from this world's."""
        if self.job is not None:
            return self.job.adopt(comm)
        comm.Set_errhandler(self.mpi.ERRORS_RETURN)
        return comm

    def lost(self) -> list[int]:
        """The ranks that are known to be lost. Local."""
        if self.job is None:
            return []
        self.comm.progress()
        lost = failed_ranks(self.mpi, self.comm)
        self.job.failed = len(lost)
        return lost

    @property
    def place(self) -> World:
        """What the program is told about its place. A spare is told that of the last rank, whose stand-in it is: alone
        as it is, it would take itself for rank 0 of a job of one.
        """
        if self.job is None or not self.job.waits:
            return self
        last = self.job.roles.size - 1
        return dataclasses.replace(self, rank=last, size=last + 1)

    def is_revoked(self) -> bool:
        """Whether a rank has given up the communicators of this world. Local."""
        return self.job is not None and bool(self.comm.Is_revoked())

    def close(self) -> None:
        """Free the communicators; MPI goes on. Collective. A second call does nothing."""
        # Under fault tolerance another rank may be lost meanwhile, and this one would wait for it.
        if self.job is None and not self.mpi.Is_finalized():
            for comm in (self.node_comm, self.comm):
                if comm != self.mpi.COMM_NULL:
                    comm.Free()

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size} on {self.host}"


def _start_mpi(*, serialized: bool) -> ModuleType:
    """Return MPI, started in a process that may do so and prepared for what it may do later."""
    if system.mpi is not None:
        return cast("ModuleType", system.mpi())
    _check_process()
    if fault_tolerance.is_enabled(os.environ):
        fault_tolerance.exclude_collectives(os.environ, initialised=mpi_library.running_mpi() is not None)
        with start_watchdog(os.environ):
            mpi = mpi_library.load_mpi(serialized=serialized, threads_go_on=True)
    else:
        mpi = mpi_library.load_mpi(serialized=serialized)
    watch_forks()
    keep_mpi_from_spawned()
    launchers.check_launcher(os.environ, mpi.COMM_WORLD.Get_size(), mpi_library.library_name(mpi))
    return mpi


def _check_process() -> None:
    mpi_library.check_not_forked()
    # A spawned child inherits the rank's place in the job: MPI_Init there kills the rank.
    if multiprocessing.parent_process() is not None and launchers.detect_launcher(os.environ) is not None:
        raise LaunchError(
            f"init() was called in process {os.getpid()}, a child that multiprocessing started from a rank. MPI "
            "started there would end the whole job. Call init() in the main process only; if this is a DataLoader "
            'worker or a spawned helper, put the call under `if __name__ == "__main__":`.'
        )


def _check_comm(mpi: ModuleType, comm: object) -> MPI.Intracomm | tuple[int, ...]:
    """What the user passed to init(), as a communicator to duplicate or a tuple of world ranks."""
    if comm is None:
        return cast("MPI.Intracomm", mpi.COMM_WORLD)
    if isinstance(comm, mpi.Comm):
        if comm == mpi.COMM_NULL:
            raise UsageError(
                "init(comm=...) got MPI.COMM_NULL: this rank is not in that communicator and must not call."
            )
        if not isinstance(comm, mpi.Intracomm):
            raise UsageError(
                "init(comm=...) got an intercommunicator; pass an intracommunicator (comm.Merge() makes one)."
            )
        return cast("MPI.Intracomm", comm)
    if not isinstance(comm, Sequence) or isinstance(comm, (str, bytes)):
        raise WrongTypeError(f"{_INVALID_COMM} Got {type(comm).__name__}.")
    try:
        ranks = tuple(operator.index(rank) for rank in comm)
    except TypeError as error:
        raise UsageError(f"{_INVALID_COMM} Got a list with {error}.") from error
    _check_ranks(ranks, mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size())
    return ranks


def _check_ranks(ranks: tuple[int, ...], rank: int, size: int) -> None:
    if not ranks:
        raise UsageError("init(comm=[]) names no rank; pass None for all ranks.")
    outside = sorted({each for each in ranks if not 0 <= each < size})
    if outside:
        raise UsageError(f"init(comm={list(ranks)}) names the ranks {outside}, but the job has ranks 0 to {size - 1}.")
    if len(set(ranks)) != len(ranks):
        twice = sorted({each for each in ranks if ranks.count(each) > 1})
        raise UsageError(f"init(comm={list(ranks)}) names the ranks {twice} more than once; name each rank once.")
    if rank not in ranks:
        raise UsageError(
            f"rank {rank} called init(comm={list(ranks)}), a list without itself. Each rank passes the list of its own "
            f"group; a rank that takes no part does not call init(), or calls init(comm=[{rank}]) to be alone."
        )


def _make_private(mpi: ModuleType, source: MPI.Intracomm | tuple[int, ...]) -> MPI.Intracomm:
    if isinstance(source, tuple):
        world = mpi.COMM_WORLD.Get_group()
        members = world.Incl(source)
        private = mpi.COMM_WORLD.Create_group(members, _GROUP_TAG)
        members.Free()
        world.Free()
    else:
        # Idup rather than Dup: a rank that waits here for others uses no CPU and can be interrupted.
        private, request = source.Idup()
        pause = 1e-5
        while not request.Test():
            system.sleep(pause)
            pause = min(pause * 2, 0.01)
    private.Set_errhandler(mpi.ERRORS_RETURN)
    return cast("MPI.Intracomm", private)


def _begin_job(
    mpi: ModuleType, comm: Any, spares: int, check: Callable[[MPI.Intracomm], None] | None, ranks_per_node: int | None
) -> tuple[Job, Any, Any]:
    """The job to make a world from, one that goes on with its survivors or a new one, and two communicators: of all
    ranks, and of this node. Collective and blocking.
    """
    if isinstance(comm, Job):
        job = comm
        job.shrink()
    else:
        source = _check_comm(mpi, comm)
        job = Job(mpi, _make_private(mpi, source) if isinstance(source, tuple) else source, spares)
        LossWatch(job.neighbours(), guard.give_up)
    RUNNING.job = job
    made = []

    def connect() -> None:
        if check is not None:
            check(job.comm)
        made.append(job.adopt(job.split()))
        made.append(job.adopt(_split_by_node(mpi, made[0], ranks_per_node)))

    job.begin(connect)
    return job, *made


def _split_by_node(mpi: ModuleType, comm: MPI.Intracomm, ranks_per_node: int | None) -> MPI.Intracomm:
    node = comm.Split_type(mpi.COMM_TYPE_SHARED, key=comm.Get_rank())
    if ranks_per_node is not None:
        whole, node = node, node.Split(node.Get_rank() // ranks_per_node, key=node.Get_rank())
        whole.Free()
    node.Set_errhandler(mpi.ERRORS_RETURN)
    node.Set_name("hvlike-node")
    return cast("MPI.Intracomm", node)


def _gather_node_ids(mpi: ModuleType, comm: MPI.Intracomm, node: MPI.Intracomm) -> list[int]:
    """For each rank the lowest rank on its node."""
    lowest = array.array("i", [comm.Get_rank()])
    node.Bcast([lowest, mpi.INT], root=0)
    node_ids = array.array("i", [0] * comm.Get_size())
    comm.Allgather([lowest, mpi.INT], [node_ids, mpi.INT])
    return node_ids.tolist()


def _prime(comm: MPI.Intracomm) -> None:
    # mpi4py issue 784: the first pickled collective can deadlock while other threads run; here none of ours does.
    comm.bcast(None, root=0)
    comm.allgather(None)


# Open MPI sends messages with this tag on the parent communicator, where the channel uses tag 1 and those from 16.
_FIRST_GROUP_TAG, _GROUP_TAGS = 2, 14


class Group:
    """The members of one process set, seen from one of them. Positions count within the group."""

    def __init__(self, world: World, number: int, ranks: Sequence[int]) -> None:
        """Local. `number` is the same on all members and differs from that of every other group."""
        self.world = world
        self.number = number
        self.ranks = tuple(ranks)
        self.size = len(self.ranks)
        self.rank = self.ranks.index(world.rank)
        position = {rank: index for index, rank in enumerate(self.ranks)}
        # Members may come in another order than that of the job.
        nodes = (tuple(sorted(position[rank] for rank in node if rank in position)) for node in world.nodes)
        self.nodes = tuple(sorted(node for node in nodes if node))
        self.node = next(node for node in self.nodes if self.rank in node)
        self.local_rank = self.node.index(self.rank)
        self.local_size = len(self.node)
        self.homogeneous = len({len(node) for node in self.nodes}) == 1
        self.comm: Any = None
        self.cross_comm: Any = None

    def connect(self, *, by_all: bool) -> None:
        """Make the communicators between nodes, if there are several. Collective, blocking, one group at a time.

        by_all: whether the ranks outside take part with `stand_by`.
        """
        if len(self.nodes) == 1:
            return
        if by_all and self.world.job is not None:
            # Whoever has a lost member waits in MPI_Comm_create_group for ever.
            self.comm = self.world.adopt(self.world.comm.Split(0, self.rank))
        else:
            world = self.world.comm.Get_group()
            members = world.Incl(self.ranks)
            tag = _FIRST_GROUP_TAG + self.number % _GROUP_TAGS
            self.comm = self.world.adopt(self.world.comm.Create_group(members, tag=tag))
            members.Free()
            world.Free()
        # Nodes of different size have no matching local ranks: there the first rank of each node crosses for all.
        crosses = self.homogeneous or self.local_rank == 0
        cross = self.comm.Split(self.local_rank if crosses else self.world.mpi.UNDEFINED, self.rank)
        self.cross_comm = cross if cross == self.world.mpi.COMM_NULL else self.world.adopt(cross)

    @staticmethod
    def stand_by(world: World, ranks: Sequence[int]) -> None:
        """What a rank outside does while those in `ranks` connect by all. Collective; blocks where they do."""
        if world.job is not None and sum(not set(node).isdisjoint(ranks) for node in world.nodes) > 1:
            world.comm.Split(world.mpi.UNDEFINED)

    def disconnect(self) -> None:
        for comm in (self.cross_comm, self.comm):
            if comm is not None and comm != self.world.mpi.COMM_NULL and self.world.job is None:
                comm.Free()
        self.comm = self.cross_comm = None
