"""Blocking calls of plain MPI, for the benchmarks that compare with them. Only the benchmarks use this file."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from hvlike.transport.memory.dtypes import Array

if TYPE_CHECKING:
    from mpi4py import MPI


class RawMpi:
    """Plain MPI over all ranks of the job, on a communicator of its own. Every call blocks."""

    def __init__(self) -> None:
        """Collective over COMM_WORLD; MPI must be running."""
        from mpi4py import MPI

        self._mpi = MPI
        self._comm: MPI.Intracomm = MPI.COMM_WORLD.Dup()
        self.rank: int = self._comm.Get_rank()
        self.size: int = self._comm.Get_size()

    def allreduce(self, array: Array) -> None:
        """Sum a float32 or float64 array over all ranks in place: MPI_Allreduce. Collective."""
        self._comm.Allreduce(self._mpi.IN_PLACE, array, self._mpi.SUM)

    def exchange(self, sent: Array, received: Array, distance: int) -> None:
        """Send an array to the rank so far above, and receive one from as far below: MPI_Sendrecv. Collective."""
        above, below = (self.rank + distance) % self.size, (self.rank - distance) % self.size
        self._comm.Sendrecv(sent, above, 0, received, below, 0)

    def barrier(self) -> None:
        self._comm.Barrier()

    def maximum(self, values: list[float]) -> list[float]:
        """Return for each value the maximum over ranks. Collective."""
        array = np.array(values, dtype=np.float64)
        self._comm.Allreduce(self._mpi.IN_PLACE, array, self._mpi.MAX)
        result: list[float] = array.tolist()
        return result

    def round_trips(self, nbytes: int, count: int) -> list[float]:
        """Return the seconds of each of `count` messages from rank 0 to rank 1 and back. Collective."""
        buffer = np.zeros(nbytes, np.uint8)
        taken = []
        self._comm.Barrier()
        for _ in range(count):
            start = time.perf_counter()
            if self.rank == 0:
                self._comm.Send(buffer, 1)
                self._comm.Recv(buffer, 1)
            elif self.rank == 1:
                self._comm.Recv(buffer, 0)
                self._comm.Send(buffer, 0)
            taken.append(time.perf_counter() - start)
        return taken

    def burst(self, nbytes: int, count: int) -> tuple[float, float]:
        """Start `count` messages to rank 1 at once. Collective.

        Returns seconds per message on rank 0: for the calls alone, and until rank 1 has received all.
        """
        buffers = [np.zeros(nbytes, np.uint8) for _ in range(count)]
        answer = np.zeros(1, np.uint8)
        requests: list[Any] = []
        if self.rank == 1:
            requests = [self._comm.Irecv(each, 0) for each in buffers]
        self._comm.Barrier()
        start = time.perf_counter()
        if self.rank == 0:
            requests = [self._comm.Isend(each, 1) for each in buffers]
        called = time.perf_counter()
        self._mpi.Request.Waitall(requests)
        if self.rank == 0:
            self._comm.Recv(answer, 1)
        elif self.rank == 1:
            self._comm.Send(answer, 0)
        ended = time.perf_counter()
        return (called - start) / count, (ended - start) / count

    def free(self) -> None:
        self._comm.Free()
