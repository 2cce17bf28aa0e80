"""hvd.run: start a job from Python and get its results back.

The job runs below this process: its output appears where the output of this process goes, and it never outlives its
caller, however that ends.
"""

from __future__ import annotations

import codecs
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, TextIO, TypeVar

from hvlike.errors import LaunchError, UsageError, WrongTypeError
from hvlike.launch.attempt import Attempt
from hvlike.launch.job_folder import RANK_PROGRAM, first_failure, raise_again, result_of, write_call
from hvlike.observe import printing
from hvlike.system.system import system
from hvlike.transport.host import find_mpirun
from hvlike.transport.host.find_mpirun import Mpirun
from hvlike.transport.host.launcher_table import OWN_VARIABLES, STARTING
from hvlike.transport.host.launchers import detect_launcher
from hvlike.transport.host.mpi_library import advice_on
from hvlike.transport.host.rank_variables import without_own

T = TypeVar("T")

_DRAIN_SECONDS = 10.0
_CHARACTERS_KEPT = 20_000
_LINES_SHOWN = 40


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
    """Call a function on every rank of a new job and return the results by rank.

    The job is started with the mpirun that belongs to the MPI library mpi4py loads, or inside an allocation that has
    none with the launcher of the batch system (srun, jsrun, flux). This process starts no MPI and need not call init().
    What the ranks print appears as it comes. Blocks until the job ends; Ctrl-C ends the job.

    Args:
        func: Called as `func(*args, **kwargs)` on every rank; it calls hvd.init() itself. With cloudpickle installed
            any function will do, one of a notebook too, else one of a module.
        args: Positional arguments of the function.
        kwargs: Keyword arguments of the function.
        np: Number of ranks. Default: 2.
        num_proc: Another name for np.
        hosts: "a:2,b:2" for two ranks on each of two hosts. Default: all ranks run on this machine, or where the batch
            system places them.
        hostfile: The same as a file in the launcher's format.
        env: Variables to add to the environment of the ranks. OMP_NUM_THREADS, if it is set nowhere, becomes the
            number of cores divided by the number of ranks.
        timeout: Seconds after which the job is ended. Default: no limit.
        mpi_args: More arguments for the launcher.
        folder: Where call and results are kept meanwhile; with several hosts, all of them must see it. Default: the
            system's folder for temporary files, with hosts or a batch system the current one.

    Returns:
        What the function has returned on each rank, in rank order.

    Raises:
        Exception: The first exception of a rank, with its traceback there as the cause.
        LaunchError: If there is no mpirun, if a rank dies without an exception, or after `timeout`.
        UsageError: For wrong arguments, for what does not pickle, and inside of a job.

    Example:
        >>> def train(lr):
        ...     hvd.init()
        ...     return hvd.rank(), lr
        >>> hvd.run(train, (0.1,), np=2)
        [(0, 0.1), (1, 0.1)]

    Source: horovod.run.
    """
    ranks = _checked_ranks(func, np, num_proc, hosts, hostfile)
    mpirun = find_mpirun.find_mpirun(find_mpirun.ask_mpi_library(os.environ), os.environ)
    host_flags = _host_flags(mpirun, hosts, hostfile)
    on_hosts = bool(host_flags) or mpirun.is_of_allocation
    parent = folder if folder is not None else os.getcwd() if on_hosts else None
    with tempfile.TemporaryDirectory(prefix="hvlike-run-", dir=parent) as place:
        write_call(Path(place), partial(func, *args, **(kwargs or {})))
        added = _added_variables(os.environ, ranks, on_hosts=on_hosts) | dict(env or {})
        flags = [*host_flags, *(_export_flags(mpirun, added) if host_flags else ()), *mpi_args]
        command = mpirun.command(ranks, [sys.executable, "-c", RANK_PROGRAM, place], flags)
        try:
            status, errors = run_to_its_end(command, without_launcher(os.environ) | added, timeout, place)
        except subprocess.TimeoutExpired:
            raise LaunchError(
                f"run: the job of {ranks} ranks has not ended within {timeout} s and was ended. Allow more time with "
                "timeout, or start fewer ranks if they are too many for this machine."
            ) from None
        return _results(Path(place), ranks, command, status, errors)


def _checked_ranks(func: object, np: int | None, num_proc: int | None, hosts: object, hostfile: object) -> int:
    """Return the number of ranks. Raises: UsageError for wrong arguments of run."""
    if not callable(func):
        raise WrongTypeError(f"run expects a function, got {type(func).__name__}.")
    if np is not None and num_proc is not None:
        raise UsageError("run: np and num_proc are two names of one argument. Pass one of them.")
    given = num_proc if np is None else np
    ranks = 2 if given is None else given
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise UsageError(f"run expects np, the number of ranks, as a whole number above 0, got {ranks!r}.")
    if hosts is not None and hostfile is not None:
        raise UsageError("run: pass hosts or hostfile, not both.")
    launcher = detect_launcher(os.environ)
    if launcher is not None and launcher.size > 1:
        raise UsageError(
            f"run starts a job itself, and this process is a rank of a job of {launcher.name} "
            f"({launcher.variable}={launcher.size}). Call the function directly, or start this program without mpirun."
        )
    return ranks


def _added_variables(environment: Mapping[str, str], ranks: int, *, on_hosts: bool) -> dict[str, str]:
    here = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [here, environment.get("PYTHONPATH")]))
    added = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    if "OMP_NUM_THREADS" not in environment and not on_hosts:
        added["OMP_NUM_THREADS"] = str(max(1, len(system.cores()) // ranks))
    return added


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables of the launcher of this process, which another job must not see."""
    environment = without_own(environment)
    if detect_launcher(environment) is None:
        return environment
    return {name: value for name, value in environment.items() if not name.startswith(OWN_VARIABLES)}


def _host_flags(mpirun: Mpirun, hosts: str | None, hostfile: str | os.PathLike[str] | None) -> list[str]:
    """Return the flags that name the hosts. Raises: UsageError where the launcher takes them from its allocation."""
    if hosts is None and hostfile is None:
        return []
    row = STARTING.get(mpirun.family)
    if row is None or row.hosts is None:
        raise UsageError(
            f"run: {mpirun.path} ({mpirun.family}) runs ranks on the hosts of its allocation, and takes none from "
            "hosts or hostfile. Leave both out; mpi_args passes options of its own, such as ['--nodelist=a,b'] to srun."
        )
    for_hosts, for_file = row.hosts
    return [for_hosts, hosts] if hosts is not None else [for_file, os.fspath(hostfile or "")]


def _export_flags(mpirun: Mpirun, added: Mapping[str, str]) -> list[str]:
    """Return the flags that take variables to other hosts: only Open MPI's launcher needs to be told."""
    export = STARTING[mpirun.family].export
    settings = [name for name in os.environ if name.startswith(("HVLIKE_", "HOROVOD_"))]
    return [flag for name in dict.fromkeys([*added, *settings]) for flag in (export, name)] if export else []


def _results(folder: Path, ranks: int, command: Sequence[str], status: int, errors: str) -> list[Any]:
    failure = first_failure(folder, ranks)
    if failure is not None:
        raise_again(failure)
    results = [result_of(folder, rank) for rank in range(ranks)]
    missing = [rank for rank, result in enumerate(results) if result is None]
    if status or missing:
        what = f"rank {missing[0]} has left no result" if missing else "all ranks have returned"
        last = "\n".join(errors.splitlines()[-_LINES_SHOWN:])
        advice = advice_on(errors)
        raise LaunchError(
            f"run: the job ended with status {status} and {what}, without an exception: it was killed, it crashed, or "
            f"it never started (`{' '.join(command)}`). {advice}{' ' * bool(advice)}The last lines on stderr:\n{last}"
        )
    return [pickle.loads(result) for result in results if result is not None]


class OutputCopy:
    """Copies what a job prints to a stream of this process as it comes, and keeps the end of it.

    The job does not inherit the stream's file: in a notebook that would lead to the terminal of the server.
    """

    def __init__(self, source: IO[bytes], streams: Callable[[], Sequence[TextIO | None]]) -> None:
        """streams: returns where to print now, a notebook changes that, and where if that fails."""
        self._source = source
        self._streams = streams
        self._kept: deque[str] = deque()
        self._length = 0
        self._thread = threading.Thread(target=self._copy, name="hvlike-output", daemon=True)
        self._thread.start()

    def finish(self) -> str:
        """Wait for the rest, with a limit: what a rank has started on another host may keep the pipe open."""
        self._thread.join(_DRAIN_SECONDS)
        return "".join(self._kept)

    def _copy(self) -> None:
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        with self._source:
            self._copy_all(decode)

    def _copy_all(self, decode: Callable[[bytes], str]) -> None:
        while data := os.read(self._source.fileno(), 1 << 16):
            text = decode(data)
            self._kept.append(text)
            self._length += len(text)
            while self._length - len(self._kept[0]) > _CHARACTERS_KEPT:
                self._length -= len(self._kept.popleft())
            # Whatever objects of the program these are: a job whose output nobody takes would stand still.
            any(printing.print_to(stream, text) for stream in self._streams() if stream is not None)


def run_to_its_end(
    command: Sequence[str], environment: Mapping[str, str], timeout: float | None, folder: str
) -> tuple[int, str]:
    """Run a launcher; return its exit status and the end of its stderr. Blocks.

    The job is ended when this is interrupted, after `timeout` seconds, and when this process is gone, in whatever way;
    then `folder` is removed. Raises: subprocess.TimeoutExpired.
    """
    pipe = subprocess.PIPE
    with Attempt(command, environment, [folder], stdout=pipe, stderr=pipe) as attempt:
        assert attempt.process.stdout is not None
        assert attempt.process.stderr is not None
        output = OutputCopy(attempt.process.stdout, lambda: (sys.stdout, sys.__stdout__))
        errors = OutputCopy(attempt.process.stderr, lambda: (sys.stderr, sys.__stderr__))
        try:
            attempt.wait(timeout)
        finally:
            attempt.end()
            output.finish()
            last_errors = errors.finish()
    return attempt.wait(), last_errors
