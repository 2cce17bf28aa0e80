"""What a job of hvd.run is given and what it leaves, as files in one folder that all its ranks see; and what they do.

call        the function, its arguments, and the search path of modules
result.N    what rank N has returned
failure.N   the exception with which rank N has ended
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hvlike.errors import LaunchError, UsageError
from hvlike.observe import printing
from hvlike.transport.host.launchers import rank_told

RANK_PROGRAM = "import sys; from hvlike.launch.job_folder import run_rank; run_rank(sys.argv[1])"
"""What each rank of the job runs; its argument is the folder."""


@dataclass(frozen=True)
class Failure:
    rank: int
    host: str
    seconds: float  # Since the epoch
    summary: str  # Class and text of the exception
    trace: str
    error: bytes | None  # The pickled exception, if it can be pickled


class RankTraceback(Exception):
    """The cause of an exception that comes from a rank. Its text is the traceback on that rank."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def write_call(folder: Path, call: partial[Any]) -> None:
    """Write the call that every rank makes. Raises: UsageError if it does not pickle."""
    name = getattr(call.func, "__qualname__", repr(call.func))
    if getattr(call.func, "__module__", None) == "__main__" and not _has_cloudpickle():
        raise UsageError(
            f"run: {name} is defined in the program itself, or in a notebook, where the ranks cannot import it. "
            "Install cloudpickle, which sends such functions as they are (pip install cloudpickle), or put it into a "
            "module."
        )
    # The search path is a pickle of its own: reading the call may need it.
    search_path = pickle.dumps([os.path.abspath(each) for each in sys.path])
    _write(folder / "call", search_path + pickled(call, f"run: {name} or one of its arguments"))


def read_call(folder: Path) -> partial[Any]:
    """Read the call. Modules are found as in the process that wrote it."""
    with (folder / "call").open("rb") as file:
        path: list[str] = pickle.load(file)
        sys.path += [each for each in path if each not in sys.path]
        call: partial[Any] = pickle.load(file)
    return call


def write_result(folder: Path, rank: int, result: object) -> None:
    """Write what the function has returned on a rank. Raises: UsageError if it does not pickle."""
    try:
        data = pickled(result, f"run: what the function has returned on rank {rank} (a {type(result).__name__})")
    except UsageError as error:
        raise UsageError(f"{error} Return tensors, numbers, strings, and lists and dicts of them.") from error
    _write(folder / f"result.{rank}", data)


def result_of(folder: Path, rank: int) -> bytes | None:
    path = folder / f"result.{rank}"
    return path.read_bytes() if path.exists() else None


def write_failure(folder: Path, rank: int, error: BaseException) -> None:
    seconds = time.time()
    try:
        data = pickled(error, "the exception")
        pickle.loads(data)
    except BaseException:
        # Many exceptions cannot be built from their arguments again. Only the text is sent then.
        data = None
    trace = printing.traceback_of(type(error), error, error.__traceback__)
    summary = printing.summary_of(type(error), error)
    failure = Failure(rank, socket.gethostname(), seconds, summary, trace, data)
    _write(folder / f"failure.{rank}", pickle.dumps(failure))


def first_failure(folder: Path, ranks: int) -> Failure | None:
    """Return the earliest exception. The others have probably followed from it."""
    paths = [folder / f"failure.{rank}" for rank in range(ranks)]
    failures: Sequence[Failure] = [pickle.loads(path.read_bytes()) for path in paths if path.exists()]
    return min(failures, key=lambda each: (each.seconds, each.rank), default=None)


def raise_again(failure: Failure) -> None:
    """Raise the exception of a rank with its traceback as the cause, or a LaunchError where that is impossible."""
    where = f"rank {failure.rank} on {failure.host}"
    cause = RankTraceback(f"{where}:\n{failure.trace}")
    error: BaseException | None = None
    if failure.error is not None:
        try:
            error = pickle.loads(failure.error)
        except Exception as obstacle:
            raise LaunchError(f"{where}: {failure.summary} ({obstacle} when it was unpickled here)") from cause
    if isinstance(error, Exception):
        raise error from cause
    # SystemExit and KeyboardInterrupt of a rank must not end the caller.
    raise LaunchError(f"{where}: {failure.summary}") from cause


def rank_of(environment: Mapping[str, str]) -> int:
    """Return the rank that the launcher has given this process. MPI need not run. Raises: LaunchError."""
    rank = rank_told(environment)
    if rank is None:
        raise LaunchError(
            "run: the launcher has told this process no rank: expected one of its variables (OMPI_COMM_WORLD_RANK, "
            "PMI_RANK, SLURM_PROCID and so on), got none. If a container is started in between, let variables pass."
        )
    return rank


def run_rank(place: str) -> None:
    """Call the function and write its result or its exception, which is then raised."""
    folder, rank = Path(place), rank_of(os.environ)
    try:
        call = read_call(folder)
        write_result(folder, rank, call())
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            write_result(folder, rank, None)
        else:
            try:
                write_failure(folder, rank, error)
            except Exception as obstacle:
                # A full disk, say. The guard reports the exception itself.
                text = printing.summary_of(type(obstacle), obstacle)
                printing.write(f"hvlike: hvd.run is not told of the exception of rank {rank}: {text}")
        raise


def _has_cloudpickle() -> bool:
    return find_spec("cloudpickle") is not None


def pickled(value: Any, what: str) -> bytes:
    """Pickle a value that errors call `what`. Raises: UsageError."""
    pickler: Any = import_module("cloudpickle") if _has_cloudpickle() else pickle
    try:
        data: bytes = pickler.dumps(value)
    except Exception as error:
        advice = "" if _has_cloudpickle() else " cloudpickle can send more: pip install cloudpickle."
        raise UsageError(f"{what} does not pickle: {type(error).__name__}: {error}.{advice}") from error
    return data


def _write(path: Path, data: bytes) -> None:
    """Write a file that is either complete or absent."""
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(data)
    part.rename(path)
