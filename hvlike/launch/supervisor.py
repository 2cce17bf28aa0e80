"""The process between whoever starts a job and the launcher of the job: it leaves nothing behind, whoever is killed.

    caller (hvd.run, launch) ---> supervisor ---> mpirun ---> ranks

    the job ends            what has outlived mpirun is ended, shared memory of MPI removed; the status is mpirun's
    SIGTERM to this         mpirun is ended, then as above; a second one: killed
    the caller is gone      the same, and the caller's files and folders are removed, as it cannot do that any more
    this is killed          mpirun gets SIGTERM from the kernel; the caller sees the end of this process

The caller may be gone in any way: by SIGTERM, SIGHUP, SIGKILL, the restart of a notebook's kernel. Processes below this
one are found through /proc, also those whose launcher was killed: a process whose parent ends is given to init, and
`adopt_orphans` has it given to this process in place of that.

This file is run by its path, and imports nothing of hvlike: it starts in a fraction of a second, before each job.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

STOP_SECONDS = 10.0
_POLL_SECONDS = 0.1
_SEGMENTS = ("sm_segment.", "mpich_shm_")  # How Open MPI and MPICH begin the names of a job's shared memory
_SET_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36  # Of prctl
_ENDING_SECONDS, _REAP_SECONDS = 10.0, 0.05


class Supervisor:
    """One job, from its start to the end of its last process."""

    def __init__(self, command: list[str], caller: int, patience: float, segments: str) -> None:
        """caller: its process id. patience: seconds that ranks have which outlive mpirun. segments: where MPI has its
        shared memory. Raises: OSError, if the command cannot be run.
        """
        self._caller = caller
        self._parent = os.getppid()
        self._patience = patience
        self._segments = segments
        self._asked = 0
        self._started = time.time()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._note)
        adopt_orphans()
        # In a session of its own: what is sent to this process reaches it alone, and it ends the job in order.
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=end_with_parent
        )

    @property
    def is_alone(self) -> bool:
        """Whether the caller is gone."""
        if os.getppid() != self._parent:
            return True
        # A wrapper around Python may be the parent.
        try:
            os.kill(self._caller, 0)
        except ProcessLookupError:
            return True
        return False

    def run(self) -> int:
        """Wait for the end of the job, and return mpirun's status, negative for a signal. Blocks."""
        while self._process.poll() is None and not self._asked and not self.is_alone:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_POLL_SECONDS)
        self._end_launcher()
        killed = end_descendants(lambda: 0.0 if self._asked > 1 else self._patience)
        if killed and not self.is_alone:
            with contextlib.suppress(OSError):
                print(f"hvlike: {killed} processes had outlived their launcher; they were killed", file=sys.stderr)
        remove_segments(self._started, self._segments)
        return self._process.returncode

    def _end_launcher(self) -> None:
        if self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        until = time.monotonic() + STOP_SECONDS
        while self._process.poll() is None and time.monotonic() < until and self._asked < 2:
            time.sleep(_REAP_SECONDS)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._asked += 1


def stop(process: subprocess.Popen[bytes], send: Callable[[int], None], seconds: float = STOP_SECONDS) -> None:
    """End a process if it still runs; a launcher ends its ranks. send: sends a signal to it, or to its group."""
    if process.poll() is not None:
        return
    send(signal.SIGTERM)
    try:
        process.wait(seconds)
    except BaseException as error:
        # Also after a second Ctrl-C.
        send(signal.SIGKILL)
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise


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


def end_descendants(patience: Callable[[], float]) -> int:
    """Wait until nothing is left below this process; after `patience()` seconds kill what is. Returns their number.

    Orphaned ranks see that their launcher is gone, and remove their files when they end by themselves.
    """
    began = time.monotonic()
    killed: set[int] = set()
    while (left := descendants()) and time.monotonic() < began + patience() + _ENDING_SECONDS:
        if time.monotonic() >= began + patience():
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


def main() -> int:
    """Run one job; see hvlike/launch/attempt.py, which starts this."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--caller", type=int, required=True)
    parser.add_argument("--patience", type=float, required=True)
    parser.add_argument("--segments", required=True)
    parser.add_argument("--refused", required=True, metavar="FILE", help="gets the reason if the command cannot run")
    parser.add_argument("--remove", action="append", default=[], metavar="PATH", help="what is the caller's to remove")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    try:
        supervisor = Supervisor(options.command, options.caller, options.patience, options.segments)
    except OSError as error:
        Path(options.refused).write_text(f"{error.errno}\n{error.strerror}\n{error.filename}")
        return 1
    status = supervisor.run()
    if supervisor.is_alone:
        for path in options.remove:
            shutil.rmtree(path, ignore_errors=True)
            with contextlib.suppress(OSError):
                os.unlink(path)
    if status < 0:
        # The end of this process tells of that of mpirun.
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    sys.exit(main())
