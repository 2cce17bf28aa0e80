"""The launch probe: the ranks of a job as MPI counts them before hvlike starts, for the doctor.

It blocks as MPI does. Call it where a supervisor can end the process.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from hvlike.transport.host import mpi_library, topology

COUNT_RANKS = """
import os
from mpi4py import MPI
print(f"ranks: {MPI.COMM_WORLD.Get_size()}", flush=True)
if MPI.COMM_WORLD.Get_size() == 1:
    with open("/proc/self/maps") as maps:
        files = {line.split()[-1] for line in maps if "/dev/shm/sm_segment." in line}
    for file in files:
        os.unlink(file)
"""
"""A program of its own: every rank prints how many ranks MPI counts. One that is alone would leave Open MPI's segment
behind, see mpi_library.unlink_start_up_segments."""

LOSE_RANK = """
import os, signal, time
from mpi4py import MPI
comm = MPI.COMM_WORLD
comm.Set_errhandler(MPI.ERRORS_RETURN)
comm.Barrier()
if comm.Get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
while not comm.Get_failed().Get_size():
    comm.Iprobe()
    time.sleep(0.01)
print(f"ranks: {comm.Get_size() - comm.Get_failed().Get_size()}", flush=True)
os._exit(0)
"""
"""A program of its own: rank 1 kills itself, the others print how many are left once MPI tells them, and end without
MPI_Finalize, which may hang soon after a failure."""

_LEVELS = ("THREAD_SINGLE", "THREAD_FUNNELED", "THREAD_SERIALIZED", "THREAD_MULTIPLE")


@dataclass(frozen=True)
class RankReport:
    rank: int
    size: int
    host: str
    thread_level: str  # MPI's name of it, as THREAD_MULTIPLE
    library: str


class LaunchProbe:
    """Plain MPI over all ranks, on a communicator of its own."""

    def __init__(self) -> None:
        """Start MPI if it does not run; waits for all processes of the job. Raises: LaunchError as `load_mpi` does."""
        self._mpi = mpi_library.load_mpi()
        world = self._mpi.COMM_WORLD
        level = self._mpi.Query_thread()
        names = {getattr(self._mpi, name): name for name in _LEVELS}
        library, host = mpi_library.library_name(self._mpi), self._mpi.Get_processor_name()
        self.place = RankReport(world.Get_rank(), world.Get_size(), host, names[level], library)
        self._comm: Any = None

    def connect(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each node in rising order. Collective; the first message between the ranks. Blocks."""
        comm = self._comm = self._mpi.COMM_WORLD.Dup()
        node = comm.Split_type(self._mpi.COMM_TYPE_SHARED, key=comm.Get_rank())
        nodes = topology.group_by_node(comm.allgather(node.bcast(comm.Get_rank(), root=0)))
        node.Free()
        return nodes

    def gather(self, value: Any) -> list[Any] | None:
        answers: list[Any] | None = self._comm.gather(value, root=0)
        return answers

    def wall_time(self) -> float:
        """Return this rank's wall clock, in seconds, right after a barrier. Collective after `connect`."""
        self._comm.Barrier()
        return time.time()

    def end(self) -> None:
        if self._comm is not None:
            self._comm.Free()
        self._mpi.Finalize()
