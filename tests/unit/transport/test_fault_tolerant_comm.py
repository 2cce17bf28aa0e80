"""Communicators under fault tolerance without MPI: what counts as a lost rank, and requests that meet one."""

import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from hvlike.transport.failure.fault_tolerant_comm import FaultTolerantCommunicator, is_failure


def test_what_a_loss_has_left_of_a_pickle_is_a_failure() -> None:
    """Open MPI can end a collective that a loss has cut short without an error and without the data."""
    mpi = SimpleNamespace(Exception=type("Exception", (RuntimeError,), {}))
    for cut in (b"\0\0\0\0", b""):
        with pytest.raises((pickle.UnpicklingError, EOFError)) as raised:
            pickle.loads(cut)
        assert is_failure(mpi, raised.value)
    assert not is_failure(mpi, KeyError("x"))


class MpiError(Exception):
    """An exception of MPI, of one of these classes."""

    LOST, OTHER = 75, 15

    def Get_error_class(self) -> int:
        """As mpi4py has it."""
        return int(self.args[0])


class Started:
    """A request that ends with an error, or well."""

    def __init__(self, error: int | None) -> None:
        self.error = error
        self.freed = False

    def Get_status(self, _: object) -> bool:
        """Say that it has ended, whatever the error."""
        return True

    def Start(self) -> None:
        """Start it."""

    def Test(self) -> bool:
        """Say that it has ended."""
        if self.error is not None:
            raise MpiError(self.error)
        return True

    def Free(self) -> None:
        """Free it."""
        self.freed = True


def communicator(request: Started, *, revoked: bool = False) -> FaultTolerantCommunicator:
    """A communicator that makes this request."""
    failed = SimpleNamespace(size=0)
    comm: Any = SimpleNamespace(
        **dict.fromkeys(["Recv_init", "Irecv", "Ibcast", "Iallreduce"], lambda *_: request),
        Is_revoked=lambda: revoked,
        Get_failed=lambda: failed,
    )
    mpi: Any = SimpleNamespace(
        Exception=MpiError,
        Status=lambda: SimpleNamespace(Get_error=int),
        ERR_PROC_FAILED=MpiError.LOST,
        ERR_PROC_FAILED_PENDING=76,
        ERR_REVOKED=77,
    )
    return FaultTolerantCommunicator(mpi, comm, lambda each: each)


def test_a_persistent_request_of_a_lost_rank_never_ends_and_is_not_freed() -> None:
    started = Started(MpiError.LOST)
    comm = communicator(started)
    request = comm.Recv_init([], 1)
    request.Start()
    assert not request.Test()
    request.Wait()
    started.error = None
    assert not request.Test()
    request.Free()
    assert not started.freed
    assert request in comm.persistent


def test_one_that_has_not_failed_is_freed_unless_the_communicator_was_revoked() -> None:
    for revoked in (False, True):
        started = Started(None)
        request = communicator(started, revoked=revoked).Recv_init([], 1)
        request.Start()
        assert request.Test()
        request.Free()
        assert started.freed != revoked


def test_other_errors_of_a_persistent_request_are_raised() -> None:
    with pytest.raises(MpiError):
        communicator(Started(MpiError.OTHER)).Recv_init([], 1).Test()


@pytest.mark.parametrize("name", ["Ibcast", "Iallreduce"])
def test_a_collective_that_ends_after_a_loss_is_not_trusted(name: str) -> None:
    """Open MPI may say that it has ended well, and have left the memory as it was."""
    for revoked in (False, True):
        comm = communicator(Started(None), revoked=revoked)
        request = getattr(comm, name)([])
        assert request.Test() != revoked
        assert (request in comm.pending) == revoked


def test_a_message_that_has_come_is_there_whoever_is_lost_later() -> None:
    assert communicator(Started(None), revoked=True).Irecv([], 1).Test()
