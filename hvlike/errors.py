"""Every exception hvlike raises, in one tree.

    HvlikeError
    ├── LaunchError                                     the launcher and MPI disagree, or MPI cannot be loaded
    ├── ForkedProcessError                              a call from a child process of a rank
    ├── HostsUpdatedInterrupt      (also RuntimeError)  elastic.run shall start again with the state as it is
    ├── UsageError                 (also ValueError)    a wrong argument, seen on this rank alone
    │   ├── DataParallelError      (also RuntimeError)  a DistributedDataParallel cannot work in this way
    │   ├── DuplicateNameError                          the name is already in flight on this rank
    │   └── UnknownHandleError                          never created here, or already synchronised
    └── HorovodInternalError       (also RuntimeError)  the ranks together could not do it
        ├── NotInitializedError    (also ValueError)    a call before init() or after shutdown()
        ├── MismatchError                               the ranks asked for different things
        │   ├── ShapeMismatchError
        │   └── DeadlockError                           every rank waits for something another one never asked for
        ├── JoinError                                   another rank has left a Join context by an exception
        ├── PeerLeftError                               a rank needed for this has ended its program
        ├── ShutdownError                               hvlike was shut down while this was in flight
        └── StalledError                                a wait ran past its limit

`HorovodInternalError` keeps Horovod's name so that code which catches it goes on working.
"""


class HvlikeError(Exception):
    """Base of all exceptions of this package."""


class LaunchError(HvlikeError, RuntimeError):
    """The job was started in a way that cannot work; the text says what to change."""


class ForkedProcessError(HvlikeError, RuntimeError):
    """A child process of a rank (a DataLoader worker, say) called into hvlike."""


class HostsUpdatedInterrupt(HvlikeError, RuntimeError):
    """Tells elastic.run to start hvlike again with the state as it is.

    skip_sync: do not take over the state of rank 0; counts where all ranks say so.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__(skip_sync)
        self.skip_sync = skip_sync


class UsageError(HvlikeError, ValueError):
    """A wrong argument. Raised on the calling rank only, before anything is sent."""


class DataParallelError(UsageError, RuntimeError):
    """A DistributedDataParallel was used in a way that cannot work, for which torch's raises a RuntimeError."""


class DuplicateNameError(UsageError):
    """The same kind of operation is already in flight on this rank under this name."""


class UnknownHandleError(UsageError):
    """The handle was not created here or has already been synchronised."""


class HorovodInternalError(HvlikeError, RuntimeError):
    """The ranks together could not complete an operation; raised on every rank that asked for it."""


class NotInitializedError(HorovodInternalError, ValueError):
    """A call that needs init() came before it, or after shutdown()."""


class MismatchError(HorovodInternalError):
    """The ranks asked for different things under one name."""


class ShapeMismatchError(MismatchError):
    """The ranks passed tensors of different shapes under one name."""


class DeadlockError(MismatchError):
    """Every rank waits for an operation that some other rank has not asked for."""


class JoinError(HorovodInternalError):
    """Another rank has left the Join context by an exception; the text names the rank and the exception."""


class PeerLeftError(HorovodInternalError):
    """A rank that has to take part has already ended its program."""


class ShutdownError(HorovodInternalError):
    """hvlike was shut down while the operation was in flight."""


class StalledError(HorovodInternalError, TimeoutError):
    """A wait ran past its limit; the text says for whom."""
