"""The processes below `launch`: found through /proc, also those whose launcher was killed, and ended to the last one.

A process whose parent ends is given to init. `adopt_orphans` has it given to this process in place of that, so that
the ranks of a killed mpirun stay below it and are found.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

from hvlike.transport.host.mpi_library import SHM_FOLDER

_SET_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36  # Of prctl
_SEGMENTS = ("sm_segment.", "mpich_shm_")  # How Open MPI and MPICH begin the names of a job's shared memory
_SEGMENT_FOLDER = "OMPI_MCA_btl_sm_backing_directory"
_ENDING_SECONDS = 10.0
_POLL_SECONDS = 0.05

_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Have processes below this one given to it when their parents end. Linux; elsewhere it does nothing."""
    if hasattr(_libc, "prctl"):
        _libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_parent() -> None:
    """In a child before it runs its program: have it sent SIGTERM when the parent's thread that started it ends."""
    if hasattr(_libc, "prctl"):
        _libc.prctl(_SET_DEATH_SIGNAL, int(signal.SIGTERM), 0, 0, 0)


def descendants() -> list[int]:
    """The processes below this one that have not ended."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name in parentheses may hold anything.
            state, parent = path.read_text(errors="replace").rpartition(")")[2].split()[:2]
            if state not in ("Z", "X"):
                children.setdefault(int(parent), []).append(int(path.parent.name))
    found = list(children.get(os.getpid(), []))
    for process in found:
        found += children.get(process, [])
    return found


def end_descendants(patience: float) -> int:
    """Wait until nothing is left below this process; after `patience` seconds kill what is. Returns their number.

    Orphaned ranks see that their launcher is gone, and remove their files when they end by themselves.
    """
    patient_until = time.monotonic() + patience
    hopeless_from = patient_until + _ENDING_SECONDS
    killed: set[int] = set()
    while (left := descendants()) and time.monotonic() < hopeless_from:
        if time.monotonic() >= patient_until:
            for process in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(process, signal.SIGKILL)
                    killed.add(process)
        _reap()
        time.sleep(_POLL_SECONDS)
    _reap()
    return len(killed)


def _reap() -> None:
    """Take the statuses of children that have ended; the launcher's was taken before."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def remove_segments(since: float, folder: str) -> list[str]:
    """Remove shared memory of MPI that was made after `since` (of time.time()) and that no process maps; return what.

    Ranks that are killed cannot remove it, and a launcher that is killed neither.
    """
    mine = []
    for file in [file for prefix in _SEGMENTS for file in Path(folder).glob(f"{prefix}*")]:
        with contextlib.suppress(FileNotFoundError):
            status = file.stat()
            if status.st_uid == os.getuid() and status.st_ctime >= since:
                mine.append(str(file))
    mapped = _maps_of_all() if mine else ""
    unused = [path for path in mine if path not in mapped]
    for path in unused:
        Path(path).unlink(missing_ok=True)
    return unused


def _maps_of_all() -> str:
    texts = []
    for path in Path("/proc").glob("[0-9]*/maps"):
        # Processes of others map nothing that is ours.
        with contextlib.suppress(OSError):
            texts.append(path.read_text(errors="replace"))
    return "\n".join(texts)


def segment_folder() -> str:
    """Where MPI puts its shared memory on this node."""
    return os.environ.get(_SEGMENT_FOLDER, SHM_FOLDER)
