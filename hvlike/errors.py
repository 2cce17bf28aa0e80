"""Every exception hvlike raises, in one tree::

    HvlikeError
    ├── LaunchError                                     the launcher and MPI disagree, or MPI cannot be loaded
    ├── ForkedProcessError                              a call from a child process of a rank
    ├── HostsUpdatedInterrupt      (also RuntimeError)  tells elastic.run to start again with the state as it is
    ├── CheckpointError            (also RuntimeError)  no checkpoint can be read, or one cannot be written
    ├── RpcError                   (also RuntimeError)  a call of hvlike.rpc or hvlike.autograd that cannot be served
    │   └── WorkerLostError        (also PeerLeftError) its worker has left, or its process has gone
    ├── WaitTimeoutError           (also TimeoutError)  wait(timeout) or result(timeout) of a handle ran out of time
    ├── UsageError                 (also ValueError)    a wrong argument, seen on this rank alone
    │   ├── DataParallelError      (also RuntimeError)  a DistributedDataParallel cannot work in this way
    │   ├── DuplicateNameError                          the name is already in flight on this rank
    │   ├── NotJoinableError       (also AssertionError)  an object in Join([...]) that has not called Joinable.__init__
    │   ├── ProcessGroupError      (also RuntimeError)  a wrong argument of a collective of torch.distributed
    │   ├── StateError             (also RuntimeError)  a call that cannot be made now, or not from here
    │   ├── UnknownHandleError                          never created here, or already synchronised
    │   ├── UnsupportedOpError     (also NotImplementedError) an op that a collective, or its gradient, does not have
    │   └── WrongTypeError         (also TypeError)     an argument of a type that is not accepted
    └── HorovodInternalError       (also RuntimeError)  an operation of several ranks has failed
        ├── NotInitializedError    (also ValueError)    a call before init() or after shutdown()
        ├── MismatchError                               the ranks asked for different things
        │   ├── ShapeMismatchError
        │   └── DeadlockError                           every rank waits for something another one never asked for
        ├── InputsExhaustedError                        a rank is out of inputs, and Join must not go on without it
        ├── JoinError                                   another rank has left a Join context with an exception
        ├── PeerLeftError                               a rank needed for this has ended its program, or is lost
        │   └── RestartError                            another rank met an error; this one has only heard of it
        ├── ShutdownError                               hvlike was shut down while this was in flight
        └── StalledError           (also TimeoutError)  a wait ran past its limit

`HorovodInternalError` keeps Horovod's name so that code which catches it goes on working.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class HvlikeError(Exception):
    """Base of all exceptions of this package."""

    told_all = False
    """The other ranks have raised an error, too, and wait for nothing."""


class LaunchError(HvlikeError, RuntimeError):
    """The job was started in a way that cannot work. The text says what to change."""


class ForkedProcessError(HvlikeError, RuntimeError):
    """A child process of a rank (a DataLoader worker, say) called into hvlike."""


class HostsUpdatedInterrupt(HvlikeError, RuntimeError):
    """Makes elastic.run start hvlike again with the state as it is.

    With `skip_sync`, if all ranks pass it, they do not take over the state of rank 0.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__(skip_sync)
        self.skip_sync = skip_sync


class CheckpointError(HvlikeError, RuntimeError):
    """No checkpoint can be read, or one cannot be written. The text names each file and its fault."""


class RpcError(HvlikeError, RuntimeError):
    """A call of hvlike.rpc or hvlike.autograd cannot be served, or made now. Torch raises a RuntimeError there."""


class WaitTimeoutError(HvlikeError, TimeoutError):
    """The operation has not ended within the timeout of wait() or result(). It goes on."""


class UsageError(HvlikeError, ValueError):
    """A wrong argument. Raised on the calling rank only, before anything is sent."""


class DataParallelError(UsageError, RuntimeError):
    """A DistributedDataParallel was used in a way that cannot work, for which torch raises a RuntimeError."""


class DuplicateNameError(UsageError):
    """The same kind of operation is already in flight on this rank under this name."""


class NotJoinableError(UsageError, AssertionError):
    """An object was passed to Join whose class has not called Joinable.__init__."""


class ProcessGroupError(UsageError, RuntimeError):
    """A wrong argument of a collective of torch.distributed, whose backends raise a RuntimeError."""


class StateError(UsageError, RuntimeError):
    """A call that cannot be made in this state or from this place. The text says when it can."""


class UnknownHandleError(UsageError):
    """The handle was not created here or has already been synchronised."""


class UnsupportedOpError(UsageError, NotImplementedError):
    """The collective, or its gradient, does not have this op. A RuntimeError too, as Horovod's."""


class WrongTypeError(UsageError, TypeError):
    """An argument of a type that is not accepted."""


class HorovodInternalError(HvlikeError, RuntimeError):
    """An operation of several ranks has failed. Raised on every rank that takes part in it."""


class NotInitializedError(HorovodInternalError, ValueError):
    """A call that needs init() came before it, or after shutdown()."""


class MismatchError(HorovodInternalError):
    """The ranks asked for different things under one name."""


class ShapeMismatchError(MismatchError):
    """The ranks passed tensors of different shapes under one name."""


class DeadlockError(MismatchError):
    """Every rank waits for an operation that some other rank has not asked for."""


class InputsExhaustedError(HorovodInternalError):
    """A rank is out of inputs, and its Join context was told not to go on without it."""


class JoinError(HorovodInternalError):
    """Another rank has left the Join context with an exception. The text names the rank and the exception."""


class PeerLeftError(HorovodInternalError):
    """A rank that has to take part has already ended its program, or is lost."""


class RestartError(PeerLeftError):
    """Another rank starts again after an error that this one has not met."""


class WorkerLostError(RpcError, PeerLeftError):
    """A worker that a call involves has left, or its process is gone. The text names it.

    Attributes:
        ranks: Its rank, or theirs.
    """

    def __init__(self, text: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(text)
        self.ranks = frozenset(ranks)


class ShutdownError(HorovodInternalError):
    """hvlike was shut down while the operation was in flight."""


class StalledError(HorovodInternalError, TimeoutError):
    """A wait ran past its limit. The text names the ranks that it waited for."""
