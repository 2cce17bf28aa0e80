"""Point-to-point messages between the memories of GPUs, by a CUDA-aware MPI.

Reductions on GPU memory are not left to MPI: the nonblocking ones crash in Open MPI.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

LARGEST = 1 << 30
"""Bytes of one message: counts of 2^31 fail in Open MPI."""

_FIRST_TAG = 1 << 20

_ABANDONED: list[Any] = []
"""What MPI may still read or write for requests that nobody waits for any more."""


class DeviceMessages:
    """The messages of one plane. Used in the loop."""

    def __init__(self, mpi: Any, comm: Any, ranks: Sequence[int], number: int) -> None:
        """comm: of the world, which returns errors. ranks: of the plane's members. number: of the plane, on all alike.

        The channel's messages have other tags.
        """
        self._mpi = mpi
        self._comm = comm
        self._ranks = tuple(ranks)
        self._tag = _FIRST_TAG + number
        self.error: type[Exception] = mpi.Exception
        """What calls of MPI raise."""

    def receive(self, address: int, nbytes: int, source: int) -> list[Any]:
        """Begin to receive from a member; the requests."""
        return [
            self._comm.Irecv(self._part(address + start, min(LARGEST, nbytes - start)), self._ranks[source], self._tag)
            for start in range(0, nbytes, LARGEST)
        ]

    def send(self, address: int, nbytes: int, target: int) -> list[Any]:
        """Begin to send to a member; the requests."""
        return [
            self._comm.Isend(self._part(address + start, min(LARGEST, nbytes - start)), self._ranks[target], self._tag)
            for start in range(0, nbytes, LARGEST)
        ]

    def have_ended(self, requests: list[Any]) -> bool:
        """Whether all of them have."""
        return bool(self._mpi.Request.Testall(requests))

    def abandon(self, requests: list[Any], memory: Any) -> None:
        """Nobody waits any more; the memory must not go to anybody else."""
        _ABANDONED.append((requests, memory))

    def _part(self, address: int, nbytes: int) -> list[Any]:
        # By address: how mpi4py would ask a tensor for it depends on what torch was built with.
        return [self._mpi.buffer.fromaddress(address, nbytes), nbytes, self._mpi.BYTE]
