"""hvd.run: start a job from Python and get its results back."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hvlike.errors import LaunchError, UsageError
from hvlike.launch.call import Call, write_call
from hvlike.launch.failure import first_failure, raise_again
from hvlike.launch.job import run_to_its_end
from hvlike.launch.results import result_of
from hvlike.transport import launchers, library, starters
from hvlike.transport.cores import available
from hvlike.transport.starters import OPEN_MPI, Starter

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
    starter = starters.find(library.ask(os.environ), os.environ)
    everywhere = hosts is not None or hostfile is not None
    parent = folder if folder is not None else os.getcwd() if everywhere else None
    with tempfile.TemporaryDirectory(prefix="hvlike-run-", dir=parent) as place:
        write_call(Path(place), Call(func, tuple(args), dict(kwargs or {})))
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
    launcher = launchers.detect(os.environ)
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
        added["OMP_NUM_THREADS"] = str(max(1, len(available()) // np))
    return added


def _without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without the traces of a launcher that has started this process, alone: ours would obey them."""
    if launchers.detect(environment) is None:
        return dict(environment)
    return {name: value for name, value in environment.items() if not name.startswith(_OF_LAUNCHERS)}


def _where(starter: Starter, hosts: str | None, hostfile: str | os.PathLike[str] | None) -> list[str]:
    """The flags that say on which hosts ranks run."""
    of_open_mpi = starter.family == OPEN_MPI
    if hosts is not None:
        return ["--host" if of_open_mpi else "-hosts", hosts]
    if hostfile is not None:
        return ["--hostfile" if of_open_mpi else "-f", os.fspath(hostfile)]
    return []


def _exports(starter: Starter, added: Mapping[str, str], *, everywhere: bool) -> list[str]:
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
