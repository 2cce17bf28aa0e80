"""The processes that are left, without MPI: their agreements, who calls them, and what they revoke."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hvlike.transport.failure.fault_tolerance import Job


class MpiError(Exception):
    """An exception of MPI."""


class Processes:
    """A communicator of two processes whose agreements end at the third look, with what the other one says."""

    def __init__(self, other: int, *, begins: bool = True, error: MpiError | None = None) -> None:
        self.rank, self.size = 0, 2
        self.other, self.begins, self.error = other, begins, error
        self.looks = 0
        self.revoked = False
        self.calls_outside = 0
        self.is_in_loop = False

    def Shrink(self) -> "Processes":
        """Nobody is lost."""
        return self

    def Set_errhandler(self, _: object) -> None:
        """As it is."""

    def Ack_failed(self) -> None:
        """All losses are known."""

    def allgather(self, value: object) -> list[Any]:
        """Only the name of this host."""
        return [value]

    def Iagree(self, flag: np.ndarray[Any, Any]) -> "Processes":
        """Begin."""
        self._called()
        if not self.begins:
            raise MpiError("internal error")
        self.flag = flag
        return self

    def Get_status(self, _: object = None) -> bool:
        """Look."""
        self._called()
        self.looks += 1
        if self.looks < 3:
            return False
        self.flag[0] &= self.other
        if self.error is not None:
            raise self.error
        return True

    def _called(self) -> None:
        self.calls_outside += not self.is_in_loop

    def Idup(self) -> tuple["Processes", "Processes"]:
        """Another communicator, which is there at the third look."""
        copy = Processes(self.other)
        return copy, copy.Iagree(np.array([1]))

    def Test(self) -> bool:
        """What has ended."""
        return True

    def Get_failed(self) -> SimpleNamespace:
        """Nobody."""
        return SimpleNamespace(size=0)

    def Is_revoked(self) -> bool:
        """Whether it was."""
        return self.revoked

    def Revoke(self) -> None:
        """Revoke it."""
        self.revoked = True

    def perform(self, action: Callable[[], None]) -> None:
        """What a loop does."""
        self.is_in_loop = True
        action()
        self.is_in_loop = False


def job(processes: Processes) -> Job:
    """A job of them."""
    mpi: Any = SimpleNamespace(
        Exception=MpiError,
        ERRORS_RETURN=0,
        COMM_NULL=None,
        COMM_WORLD=SimpleNamespace(rank=0),
        Get_processor_name=lambda: "here",
        Status=lambda: SimpleNamespace(Get_error=int),
    )
    return Job(mpi, processes, 0)


@pytest.mark.parametrize("other", [0, 1])
def test_all_have_to_say_yes(other: int) -> None:
    processes = Processes(other)
    assert job(processes).agree(True) == bool(other)
    assert job(Processes(1)).agree(False) is False


def test_mpi_is_called_by_the_loop_alone() -> None:
    """Open MPI puts a result aside without its bytes when another thread is in an agreement."""
    processes = Processes(1)
    assert job(processes).agree(True, processes.perform)
    assert processes.looks == 3
    assert processes.calls_outside == 0


def test_the_answer_holds_when_another_process_is_lost_meanwhile() -> None:
    assert job(Processes(0, error=MpiError("a process is lost"))).agree(True) is False
    assert job(Processes(1, error=MpiError("a process is lost"))).agree(True)


def test_an_agreement_that_cannot_begin_is_an_error() -> None:
    with pytest.raises(MpiError, match="internal error"):
        job(Processes(1, begins=False)).agree(True)


@pytest.mark.parametrize("looks", [0, 2, 3])
def test_a_communicator_is_revoked_only_once_it_is_made(looks: int) -> None:
    """Open MPI crashes when it revokes one that a loss has left half made."""
    everybody = job(Processes(1))
    parent = everybody.adopt(Processes(1))
    copy, request = parent.Idup()
    for _ in range(looks):
        request.Test()
    everybody.revoke()
    assert parent.comm.revoked
    assert copy.comm.revoked == (looks == 3)
