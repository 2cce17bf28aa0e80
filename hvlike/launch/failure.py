"""How the exception of a rank reaches the process that has called hvd.run."""

from __future__ import annotations

import pickle
import socket
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvlike.errors import LaunchError
from hvlike.launch.call import packed, write


class RankTraceback(Exception):
    """The cause of an exception that comes from a rank: its text is the traceback there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(frozen=True)
class Failure:
    """How one rank has ended."""

    rank: int
    host: str
    seconds: float
    """Since the epoch."""
    summary: str
    """Class and text of the exception."""
    trace: str
    error: bytes | None
    """The exception, pickled, if it can be."""


def write_failure(folder: Path, rank: int, error: BaseException) -> None:
    """Leave an exception for the caller of hvd.run."""
    seconds = time.time()
    try:
        data = packed(error, "the exception")
        pickle.loads(data)
    except Exception:
        # Many exceptions cannot be made again from their arguments: the text goes without them.
        data = None
    trace = "".join(traceback.format_exception(error))
    summary = "".join(traceback.format_exception_only(error)).strip()
    failure = Failure(rank, socket.gethostname(), seconds, summary, trace, data)
    write(folder / f"failure.{rank}", pickle.dumps(failure))


def first_failure(folder: Path, ranks: int) -> Failure | None:
    """The exception that was there first; the others are likely to have followed from it."""
    paths = [folder / f"failure.{rank}" for rank in range(ranks)]
    failures: Sequence[Failure] = [pickle.loads(path.read_bytes()) for path in paths if path.exists()]
    return min(failures, key=lambda each: (each.seconds, each.rank), default=None)


def raise_again(failure: Failure) -> None:
    """Raise the exception of a rank, with the traceback of there as its cause; a LaunchError where that cannot be."""
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
