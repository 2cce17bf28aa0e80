"""One attempt of a job that `launch` starts: it runs, is asked to end or ended, and leaves nothing behind.

The processes below `launch` are found through /proc, also those whose launcher was killed, and ended to the last one. A
process whose parent ends is given to init. `adopt_orphans` has it given to this process in place of that, so that the
ranks of a killed mpirun stay below it and are found.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

from hvlike.errors import LaunchError
from hvlike.launch.run import stop
from hvlike.observe import printing
from hvlike.transport.failure.exit_status import VARIABLE, JobRecord
from hvlike.transport.host.find_mpirun import OPEN_MPI, examine_launcher
from hvlike.transport.host.mpi_library import SHM_FOLDER

_POLL_SECONDS = 0.2
ORPHAN_SECONDS = 5.0  # How long ranks have that lost their launcher: they look about once a second
_OPEN_MPI_NAMES = ("mpirun", "mpiexec", "orterun", "prterun")
_SESSION_FOLDERS = ("PRTE_MCA_prte_tmpdir_base", "PRTE_MCA_prte_local_tmpdir_base")
_SEGMENTS = ("sm_segment.", "mpich_shm_")  # How Open MPI and MPICH begin the names of a job's shared memory
_SEGMENT_FOLDER = "OMPI_MCA_btl_sm_backing_directory"
_SET_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36  # Of prctl
_ENDING_SECONDS, _REAP_SECONDS = 10.0, 0.05


def say(text: str) -> None:
    printing.write(f"hvlike launch: {text}")


@dataclass
class Requests:
    """The signals that have asked this process to end, in order of arrival."""

    signals: list[int] = field(default_factory=list)
    _previous: dict[int, Any] = field(default_factory=dict)

    def __enter__(self) -> Requests:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signals.append(number)

    def wait(self, seconds: float) -> None:
        """Sleep, until something is asked."""
        until = time.monotonic() + seconds
        while not self.signals and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)


def with_variables(command: Sequence[str], names: Sequence[str]) -> list[str]:
    """The command, told to take variables to ranks on other nodes: only Open MPI's mpirun has to be."""
    first, *rest = command
    if Path(first).name not in _OPEN_MPI_NAMES:
        return list(command)
    try:
        family = examine_launcher(first).family
    except LaunchError:
        return list(command)
    given = {word.partition("=")[0] for flag, word in pairwise(rest) if flag == "-x"}
    added = [word for name in names if name not in given for word in ("-x", name)] if family == OPEN_MPI else []
    return [first, *added, *rest]


def run_attempt(command: Sequence[str], environment: Mapping[str, str], requests: Requests, grace: float) -> int:
    """Run the job to its end and return its launcher's status, negative for a signal. Blocks.

    The first request is passed on through the job's record; the job has `grace` seconds to end by itself. After that,
    and at a second request, its launcher is ended. All its processes on this node have ended on return.
    Raises: OSError, if the command cannot be run.
    """
    started = time.time()
    with tempfile.TemporaryDirectory(prefix="hvlike-launch-", ignore_cleanup_errors=True) as folder:
        # An mpirun that is killed leaves its files.
        places = {} if any(name in environment for name in _SESSION_FOLDERS) else {_SESSION_FOLDERS[1]: folder}
        # In a session of its own: Ctrl-C reaches this process alone.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env={**environment, **places},
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        try:
            _watch(process, JobRecord(Path(environment[VARIABLE])), requests, grace)
        finally:
            stop(process, process.send_signal)
            killed = end_descendants(ORPHAN_SECONDS)
            if killed:
                say(f"{killed} processes had outlived their launcher; they were killed")
            remove_segments(started, os.environ.get(_SEGMENT_FOLDER, SHM_FOLDER))
    return process.returncode


def _watch(process: subprocess.Popen[bytes], record: JobRecord, requests: Requests, grace: float) -> None:
    ends_at = None
    while True:
        try:
            process.wait(_POLL_SECONDS)
            return
        except subprocess.TimeoutExpired:
            pass
        if requests.signals and ends_at is None:
            ends_at = time.monotonic() + grace
            record.ask()
            name = signal.Signals(requests.signals[0]).name
            say(f"{name}: the job is to end at its next commit, within {grace:g} s; a second signal ends it now")
        if ends_at is not None and (len(requests.signals) > 1 or time.monotonic() > ends_at):
            say("the job has not ended by itself: it is ended")
            return


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
        time.sleep(_REAP_SECONDS)
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
