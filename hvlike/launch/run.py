"""hvd.run: start a job from Python and get its results back.

The job is a child process: its output appears where the output of this process goes, and it never outlives its
caller.
"""

from __future__ import annotations

import codecs
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TextIO, TypeVar

from hvlike.errors import LaunchError, UsageError
from hvlike.launch.job_folder import JobCall, first_failure, raise_again, result_of, write_call
from hvlike.transport.host import find_mpirun, launchers
from hvlike.transport.host.find_mpirun import OPEN_MPI, Mpirun
from hvlike.transport.host.topology import available_cores

GRACE_SECONDS = 10.0
_DRAIN_SECONDS = 10.0
_CHARACTERS_KEPT = 20_000


class Pump:
    """Copies what a job prints to this process's own stream, as it comes, and remembers the end of it.

    Not by handing down the file: in a notebook that would lead to the terminal of the server.
    """

    def __init__(self, source: IO[bytes], stream: Callable[[], TextIO | None]) -> None:
        """stream: where to print now; a notebook changes that."""
        self._source = source
        self._stream = stream
        self._kept: deque[str] = deque()
        self._length = 0
        self._thread = threading.Thread(target=self._copy, name="hvlike-output", daemon=True)
        self._thread.start()

    def finish(self) -> str:
        """Wait for the rest, but not for ever: a process that outlives its launcher keeps the pipe open."""
        self._thread.join(_DRAIN_SECONDS)
        return "".join(self._kept)

    def _copy(self) -> None:
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        while data := os.read(self._source.fileno(), 1 << 16):
            text = decode(data)
            self._kept.append(text)
            self._length += len(text)
            while self._length - len(self._kept[0]) > _CHARACTERS_KEPT:
                self._length -= len(self._kept.popleft())
            stream = self._stream()
            if stream is not None:
                stream.write(text)
                stream.flush()


def run_to_its_end(command: Sequence[str], environment: Mapping[str, str], timeout: float | None) -> tuple[int, str]:
    """Run a launcher; returns its exit status and the end of what came on stderr. Blocks.

    The job is ended when this is interrupted, and after `timeout` seconds.
    Raises: subprocess.TimeoutExpired.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(environment),
        # Ctrl-C reaches this process alone, which then ends the job in order.
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr:
        output = Pump(process.stdout, lambda: sys.stdout)
        errors = Pump(process.stderr, lambda: sys.stderr)
        try:
            process.wait(timeout)
        finally:
            stop(process)
            output.finish()
            said = errors.finish()
    return process.returncode, said


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a launcher, which ends its ranks, if it still runs."""
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(GRACE_SECONDS)
    except BaseException as error:
        # Also after a second Ctrl-C.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise


T = TypeVar("T")

_LAST_LINES = 40
_RANKS = 2
_OF_LAUNCHERS = ("OMPI_COMM_WORLD_", "PMIX_", "PMI_", "PRTE_MCA_", "HYDI_", "HYDRA_")


def run(
    func: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int | None = None,
    *,
    num_proc: int | None = None,
    hosts: str | None = None,
    hostfile: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    mpi_args: Sequence[str] = (),
    folder: str | os.PathLike[str] | None = None,
) -> list[T]:
    """Call func(*args, **kwargs) on every rank of a new job of `np` ranks (2); return what each has returned, by rank.

    func: calls hvd.init() itself. With cloudpickle installed any function, also one of a notebook; else of a module.
    hosts: "a:2,b:2" for two ranks on each of two hosts; hostfile: the same as a file of the launcher's form. Without
        them all ranks run on this machine. num_proc: another name for np.
    env: variables to add to the environment of the ranks. OMP_NUM_THREADS, where nobody sets it, is this machine's
        cores by ranks.
    timeout: seconds after which the job is ended. mpi_args: more arguments for mpirun.
    folder: where call and results lie meanwhile; with hosts all of them must see it. Default: the system's folder for
        temporary files, with hosts the current one.

    Started with the mpirun that belongs to the MPI library mpi4py loads here. This process starts no MPI and need not
    call init(). What the ranks print appears as it comes. Blocks; Ctrl-C ends the job.
    Raises: the first exception of a rank, with its traceback there as the cause; LaunchError when there is no mpirun,
        when a rank dies without an exception, or after `timeout`; UsageError (a ValueError) for wrong arguments, for
        what does not pickle, and inside of a job.
    Source: horovod.run.
    """
    np = _number_of_ranks(np, num_proc)
    _check(func, np, hosts, hostfile)
    starter = find_mpirun.find_mpirun(find_mpirun.ask_mpi_library(os.environ), os.environ)
    everywhere = hosts is not None or hostfile is not None
    parent = folder if folder is not None else os.getcwd() if everywhere else None
    with tempfile.TemporaryDirectory(prefix="hvlike-run-", dir=parent) as place:
        write_call(Path(place), JobCall(func, tuple(args), dict(kwargs or {})))
        added = _added(os.environ, np, everywhere=everywhere) | dict(env or {})
        flags = [*_where(starter, hosts, hostfile), *_exports(starter, added, everywhere=everywhere), *mpi_args]
        command = starter.command(np, [sys.executable, "-m", "hvlike.launch.rank", place], flags)
        try:
            status, errors = run_to_its_end(command, _without_launcher(os.environ) | added, timeout)
        except subprocess.TimeoutExpired:
            raise LaunchError(f"run: the job of {np} ranks had not ended after {timeout} s and was stopped.") from None
        return _results(Path(place), np, command, status, errors)


def _number_of_ranks(np: int | None, num_proc: int | None) -> int:
    if np is not None and num_proc is not None:
        raise UsageError("run: np and num_proc are two names of one argument; pass one of them.")
    given = num_proc if np is None else np
    return _RANKS if given is None else given


def _check(func: object, np: object, hosts: str | None, hostfile: object) -> None:
    if not callable(func):
        raise UsageError(f"run expects a function, got {type(func).__name__}.")
    if isinstance(np, bool) or not isinstance(np, int) or np < 1:
        raise UsageError(f"run expects np, the number of ranks, as a whole number above 0, got {np!r}.")
    if hosts is not None and hostfile is not None:
        raise UsageError("run: pass hosts or hostfile, not both.")
    launcher = launchers.detect_launcher(os.environ)
    if launcher is not None and launcher.size > 1:
        raise UsageError(
            f"run starts a job itself, and this process is a rank of a job of {launcher.name} "
            f"({launcher.variable}={launcher.size}): call the function directly, or start this program without mpirun."
        )


def _added(environment: Mapping[str, str], np: int, *, everywhere: bool) -> dict[str, str]:
    """What is added to the environment of the ranks."""
    here = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [here, environment.get("PYTHONPATH")]))
    added = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    if "OMP_NUM_THREADS" not in environment and not everywhere:
        added["OMP_NUM_THREADS"] = str(max(1, len(available_cores()) // np))
    return added


def _without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without the traces of a launcher that has started this process, alone: ours would obey them."""
    if launchers.detect_launcher(environment) is None:
        return dict(environment)
    return {name: value for name, value in environment.items() if not name.startswith(_OF_LAUNCHERS)}


def _where(starter: Mpirun, hosts: str | None, hostfile: str | os.PathLike[str] | None) -> list[str]:
    """The flags that say on which hosts ranks run."""
    of_open_mpi = starter.family == OPEN_MPI
    if hosts is not None:
        return ["--host" if of_open_mpi else "-hosts", hosts]
    if hostfile is not None:
        return ["--hostfile" if of_open_mpi else "-f", os.fspath(hostfile)]
    return []


def _exports(starter: Mpirun, added: Mapping[str, str], *, everywhere: bool) -> list[str]:
    """The flags that take variables to other hosts; only Open MPI's launcher needs to be told."""
    if starter.family != OPEN_MPI or not everywhere:
        return []
    ours = [name for name in os.environ if name.startswith(("HVLIKE_", "HOROVOD_"))]
    return [flag for name in dict.fromkeys([*added, *ours]) for flag in ("-x", name)]


def _results(folder: Path, np: int, command: Sequence[str], status: int, errors: str) -> list[Any]:
    """What the ranks have returned, or the first failure."""
    failure = first_failure(folder, np)
    if failure is not None:
        raise_again(failure)
    results = [result_of(folder, rank) for rank in range(np)]
    missing = [rank for rank, result in enumerate(results) if result is None]
    if status or missing:
        what = f"rank {missing[0]} has left no result" if missing else "all ranks have returned"
        last = "\n".join(errors.splitlines()[-_LAST_LINES:])
        raise LaunchError(
            f"run: the job ended with status {status} and {what}, nor an exception: it was killed, it crashed, or it "
            f"never started (`{' '.join(command)}`). The last lines on stderr:\n{last}"
        )
    return [pickle.loads(result) for result in results if result is not None]
