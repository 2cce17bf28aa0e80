"""A stand-in for mpi4py.MPI in which all ranks of a job live in one process: for simulated jobs.

    job = SimulatedMpi(scheduler, nodes=[[0, 1], [2]])
    mpi = job.module(1)                                         # What `from mpi4py import MPI` is to rank 1
    request = mpi.COMM_WORLD.Isend([array, mpi.BYTE], 2, tag=7)

    simulated_network.py     messages on their way, and who is in a call
    simulated_requests.py    sends, receives and collectives that are under way
    simulated_comm.py        communicators and groups
    simulated_buffers.py     datatypes, operators, memory
    simulated_ulfm.py        losses that a job outlives

It offers what hvlike uses of MPI. All that happens follows from the scheduler: its order of
threads, its random numbers, its clock. A call of MPI switches threads first, then does all it does at once; one that
blocks waits in the scheduler. MPI goes on with the messages of a rank only in the rank's own calls.

Wrong uses of MPI raise AssertionError, and stand in `violations` in case the code above catches it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import ModuleType

from support.simulation.machine.simulated_buffers import DATATYPES, ERRORS_RETURN, IN_PLACE, OPS
from support.simulation.machine.simulated_comm import COMM_TYPE_SHARED, UNDEFINED, Comm, Group, Intracomm
from support.simulation.machine.simulated_network import (
    ANY_SOURCE,
    ANY_TAG,
    THREAD_FUNNELED,
    THREAD_MULTIPLE,
    THREAD_SERIALIZED,
    THREAD_SINGLE,
    Network,
    ProcessEnded,
    Scheduler,
)
from support.simulation.machine.simulated_requests import ERR_TRUNCATE, MpiError, Status
from support.simulation.machine.simulated_ulfm import ERR_PROC_FAILED, ERR_PROC_FAILED_PENDING, ERR_REVOKED, Failures

__all__ = ["MpiError", "ProcessEnded", "Scheduler", "SimulatedModule", "SimulatedMpi"]

LIBRARY_VERSION = "Simulated MPI 1.0"


class SimulatedMpi(Network):
    """MPI of a whole job. See Network for what can be set before the job runs."""

    def __init__(self, scheduler: Scheduler, nodes: Sequence[Sequence[int]], *, outlives: bool = False) -> None:
        """nodes: the ranks that share memory, of each node. outlives: whether there is ULFM."""
        super().__init__(scheduler, nodes)
        if outlives:
            self.failures = Failures(self)
        self.world = self.new_context(range(self.size), "MPI_COMM_WORLD")
        self._modules = [SimulatedModule(self, rank) for rank in range(self.size)]

    def module(self, rank: int) -> SimulatedModule:
        return self._modules[rank]


class SimulatedModule(ModuleType):
    """What mpi4py.MPI is to one rank. MPI is initialised from the beginning."""

    def __init__(self, job: SimulatedMpi, rank: int) -> None:
        super().__init__("mpi4py.MPI")
        self.job, self.job_rank = job, rank
        self.Comm, self.Intracomm, self.Group, self.Status, self.Exception = Comm, Intracomm, Group, Status, MpiError
        self.COMM_WORLD = Intracomm(job, rank, job.world)
        self.COMM_SELF = Intracomm(job, rank, job.new_context([rank], "MPI_COMM_SELF"))
        self.COMM_NULL = Comm(job, rank, None)
        self.ANY_SOURCE, self.ANY_TAG, self.UNDEFINED = ANY_SOURCE, ANY_TAG, UNDEFINED
        self.COMM_TYPE_SHARED, self.IN_PLACE, self.ERRORS_RETURN = COMM_TYPE_SHARED, IN_PLACE, ERRORS_RETURN
        self.THREAD_SINGLE, self.THREAD_FUNNELED = THREAD_SINGLE, THREAD_FUNNELED
        self.THREAD_SERIALIZED, self.THREAD_MULTIPLE = THREAD_SERIALIZED, THREAD_MULTIPLE
        self.ERR_TRUNCATE = ERR_TRUNCATE
        self.ERR_PROC_FAILED, self.ERR_PROC_FAILED_PENDING = ERR_PROC_FAILED, ERR_PROC_FAILED_PENDING
        self.ERR_REVOKED = ERR_REVOKED
        vars(self).update(DATATYPES)
        vars(self).update(OPS)

    def Init_thread(self, required: int = THREAD_MULTIPLE) -> int:
        self.job.refuse(f"rank {self.job_rank} calls Init_thread where MPI is initialised")

    def report_lost(self, ranks: Iterable[int]) -> bool:
        """What hvlike does by PMIx: have MPI of this rank take others for lost."""
        assert self.job.failures is not None
        for rank in ranks:
            self.job.failures.notice(self.job_rank, rank, self.job.scheduler.now)
        return True

    def Is_initialized(self) -> bool:
        return True

    def Is_finalized(self) -> bool:
        return self.job_rank in self.job.finalized

    def Finalize(self) -> None:
        """End MPI for this rank; does not wait for the others, as MPI's own may."""
        self.job.finalized.add(self.job_rank)

    def Query_thread(self) -> int:
        return self.job.thread_level

    def Get_library_version(self) -> str:
        return LIBRARY_VERSION

    def get_vendor(self) -> tuple[str, tuple[int, int, int]]:
        return "Simulated MPI", (1, 0, 0)

    def Get_processor_name(self) -> str:
        return f"node{self.job.node_of[self.job_rank]}"
