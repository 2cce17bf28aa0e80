"""Blocking MPI calls by themselves, for benchmarks that compare with them. Nothing else uses this file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hvlike.transport.dtypes import Array

if TYPE_CHECKING:
    from mpi4py import MPI


class RawMpi:
    """Plain MPI over all ranks of the job, on a communicator of its own."""

    def __init__(self) -> None:
        """Collective over COMM_WORLD; MPI must be running."""
        from mpi4py import MPI

        self._mpi = MPI
        self._comm: MPI.Intracomm = MPI.COMM_WORLD.Dup()
        self.rank: int = self._comm.Get_rank()
        self.size: int = self._comm.Get_size()
        self.library: str = " ".join(MPI.Get_library_version().strip("\0 ").splitlines()[0].split(",")[0].split())

    def allreduce(self, array: Array) -> None:
        """Sum a float32 or float64 array over all ranks in place: MPI_Allreduce. Collective, blocks."""
        self._comm.Allreduce(self._mpi.IN_PLACE, array, self._mpi.SUM)

    def barrier(self) -> None:
        """Wait for all ranks. Collective, blocks."""
        self._comm.Barrier()

    def maximum(self, values: list[float]) -> list[float]:
        """Return for each value the maximum over ranks. Collective, blocks."""
        array = np.array(values, dtype=np.float64)
        self._comm.Allreduce(self._mpi.IN_PLACE, array, self._mpi.MAX)
        result: list[float] = array.tolist()
        return result

    def free(self) -> None:
        """Free the communicator. Collective."""
        self._comm.Free()
