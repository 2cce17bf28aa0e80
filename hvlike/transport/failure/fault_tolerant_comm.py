"""Communicators under fault tolerance: they hide failures, which `Context` learns of from `failed_ranks`.

What involves a lost process never ends, until the survivors revoke the communicator. A request that has failed must not
be freed, as Open MPI then aborts the process when it completes later; so requests are only looked at, and kept with
their buffers until they have ended well. Those that are persistent stay when they fail.

Source: User-Level Failure Mitigation, as in Open MPI 5 (docs.open-mpi.org, "User-Level Fault Mitigation").
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable
from types import ModuleType
from typing import Any

from hvlike.system.system import system

_PROGRESS_TAG = 15  # Of which there is no message
_POLL_SECONDS = 1e-3
GARBAGE = pickle.UnpicklingError, EOFError
"""From a collective of Open MPI that a loss has cut short without an error."""


def is_failure(mpi: ModuleType, error: BaseException) -> bool:
    """Whether an exception says that a process is lost, or that the communicator was revoked."""
    if not isinstance(error, mpi.Exception):
        return isinstance(error, GARBAGE)
    kinds = (mpi.ERR_PROC_FAILED, mpi.ERR_PROC_FAILED_PENDING, mpi.ERR_REVOKED)
    return error.Get_error_class() in kinds


class WatchedRequest:
    """A request of mpi4py that is only looked at, and kept by its communicator until it has ended well."""

    def __init__(self, owner: FaultTolerantCommunicator, request: Any, *, is_collective: bool = False) -> None:
        self._owner = owner
        self._request = request
        self._is_collective = is_collective
        owner.pending.add(self)

    @property
    def has_ended(self) -> bool:
        """Whether Test has returned True."""
        return self._request is None

    def Test(self) -> bool:
        if self._request is None:
            return True
        status = self._owner.status
        try:
            if not self._request.Get_status(status) or status.Get_error():
                return False
            # Open MPI can end a collective that a loss has cut short without an error, and without the data.
            if self._is_collective and self._owner.is_broken():
                return False
            self._request.Test()
        except self._owner.mpi.Exception as error:
            if not is_failure(self._owner.mpi, error):
                raise
            return False
        self._request = None
        self._owner.pending.discard(self)
        return True

    def Cancel(self) -> None:
        if self._request is not None and not self._owner.is_broken():
            self._request.Cancel()

    def Wait(self) -> None:
        while not self.Test():
            if self._owner.is_broken():
                return
            system.sleep(_POLL_SECONDS)


class PersistentRequest:
    """One that is started again and again. A failure does not free it, so it need not be looked at first."""

    def __init__(self, owner: FaultTolerantCommunicator, request: Any) -> None:
        self._owner = owner
        self._request = request
        self._has_failed = False
        owner.persistent.add(self)

    def Start(self) -> None:
        self._unless_failed(self._request.Start)

    def Test(self) -> bool:
        return bool(self._unless_failed(self._request.Test))

    def Cancel(self) -> None:
        self._unless_failed(self._request.Cancel)

    def Wait(self) -> None:
        while not self.Test():
            if self._has_failed or self._owner.is_broken():
                return
            system.sleep(_POLL_SECONDS)

    def Free(self) -> None:
        if not self._has_failed and not self._owner.is_broken():
            self._owner.persistent.discard(self)
            self._request.Free()

    def _unless_failed(self, call: Callable[[], Any]) -> Any:
        """What the call returns; None from the first one on that involves a lost process."""
        if self._has_failed:
            return None
        try:
            return call()
        except self._owner.mpi.Exception as error:
            if not is_failure(self._owner.mpi, error):
                raise
            self._has_failed = True
            return None


class _Lost:
    """A request that involves a lost process: it never ends, and what waits for it is ended in another way."""

    def Test(self) -> bool:
        return False

    def Cancel(self) -> None:
        return

    def Wait(self) -> None:
        return


class _Message:
    def __init__(self, owner: FaultTolerantCommunicator, message: Any) -> None:
        self._owner = owner
        self._message = message

    def Irecv(self, buffer: Any) -> Any:
        return self._owner.started(lambda: self._message.Irecv(buffer))


class FaultTolerantCommunicator:
    """A communicator of mpi4py whose non-blocking calls do not raise when a process is lost."""

    def __init__(self, mpi: ModuleType, comm: Any, adopt: Callable[[Any], FaultTolerantCommunicator]) -> None:
        """adopt: has another one revoked with this one, and returns what to use in its place."""
        self.mpi = mpi
        self.comm = comm
        self.status = mpi.Status()
        self.pending: set[WatchedRequest] = set()
        self.persistent: set[PersistentRequest] = set()
        self._making: WatchedRequest | None = None
        self._adopt = adopt

    def started(self, start: Callable[[], Any], *, is_collective: bool = False) -> Any:
        """The request that `start` makes."""
        try:
            return WatchedRequest(self, start(), is_collective=is_collective)
        except self.mpi.Exception as error:
            if not is_failure(self.mpi, error):
                raise
            return _Lost()

    def Isend(self, *arguments: Any, **named: Any) -> Any:
        return self.started(lambda: self.comm.Isend(*arguments, **named))

    def Irecv(self, *arguments: Any, **named: Any) -> Any:
        return self.started(lambda: self.comm.Irecv(*arguments, **named))

    def Send_init(self, *arguments: Any, **named: Any) -> PersistentRequest:
        return PersistentRequest(self, self.comm.Send_init(*arguments, **named))

    def Recv_init(self, *arguments: Any, **named: Any) -> PersistentRequest:
        return PersistentRequest(self, self.comm.Recv_init(*arguments, **named))

    def Iallreduce(self, *arguments: Any, **named: Any) -> Any:
        return self.started(lambda: self.comm.Iallreduce(*arguments, **named), is_collective=True)

    def Ibcast(self, *arguments: Any, **named: Any) -> Any:
        return self.started(lambda: self.comm.Ibcast(*arguments, **named), is_collective=True)

    def Improbe(self, *arguments: Any, **named: Any) -> Any:
        try:
            message = self.comm.Improbe(*arguments, **named)
        except self.mpi.Exception as error:
            if not is_failure(self.mpi, error):
                raise
            # From now on what the others have sent is found again, until the communicator is revoked.
            if not self.comm.Is_revoked():
                self.comm.Ack_failed()
            return None
        return None if message is None else _Message(self, message)

    def Idup(self) -> tuple[FaultTolerantCommunicator, Any]:
        copy, request = self.comm.Idup()
        adopted = self._adopt(copy)
        adopted._making = WatchedRequest(self, request, is_collective=True)
        return adopted, adopted._making

    @property
    def is_made(self) -> bool:
        """Whether it can be used. Open MPI crashes when a communicator is revoked before that."""
        return self._making is None or self._making.has_ended

    def progress(self) -> None:
        """Let MPI learn that a rank is lost, or has revoked this: on one node nothing else calls it."""
        with contextlib.suppress(self.mpi.Exception):
            self.comm.Iprobe(tag=_PROGRESS_TAG)

    def is_broken(self) -> bool:
        """Whether a process of it is lost, or a rank has revoked it."""
        if self.comm.Is_revoked():
            return True
        failed = self.comm.Get_failed()
        if not failed.size:
            return False
        failed.Free()
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.comm, name)


def failed_ranks(mpi: ModuleType, comm: Any) -> list[int]:
    """The ranks of a communicator whose processes are known to be lost. Local."""
    failed = comm.Get_failed()
    if not failed.size:
        return []
    members = comm.Get_group()
    try:
        return sorted(mpi.Group.Translate_ranks(failed, list(range(failed.size)), members))
    finally:
        members.Free()
        failed.Free()
