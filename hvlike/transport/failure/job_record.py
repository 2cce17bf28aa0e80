"""What a job and `python -m hvlike launch` tell each other: two files, whatever the launcher in between is and answers.

    PATH        written by rank 0, once: how the job has ended, a word of `FINISHED`, `PREEMPTED`
    PATH.ask    made by `launch`: the job is to end at its next commit, with a checkpoint

PATH is HVLIKE_LAUNCH_RECORD. A job that leaves no PATH has failed: the status of a launcher says little where MPI
survives the loss of ranks, and nothing where the launcher itself was killed. This file imports nothing of hvlike.
"""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path

VARIABLE = "HVLIKE_LAUNCH_RECORD"
FINISHED, PREEMPTED = "finished", "preempted"

EXIT_PREEMPTED = 75
"""The exit status of a job that has ended because it was asked to, and is to be started again (EX_TEMPFAIL)."""


class JobRecord:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._request = path.with_name(f"{path.name}.ask")

    def write(self, ending: str) -> None:
        """Write how the job has ended; the first word stays. Raises OSError."""
        if self.path.exists():
            return
        part = self.path.with_name(f"{self.path.name}.part")
        part.write_text(ending)
        part.replace(self.path)

    def read(self) -> str | None:
        return self.path.read_text() if self.path.exists() else None

    def ask(self) -> None:
        self._request.touch()

    def is_asked(self) -> bool:
        return self._request.exists()

    def remove(self) -> None:
        for path in (self.path, self._request, self.path.with_name(f"{self.path.name}.part")):
            path.unlink(missing_ok=True)


class _OfThisProcess:
    record: JobRecord | None = None
    owner = 0
    writes = False
    last_error: object = None


def keep_record(path: str, *, writes: bool) -> None:
    """Watch how this process ends; writes: it is rank 0. Call it before the guard is installed, whose exit handler then
    comes first and ends the process if it fails.
    """
    _OfThisProcess.record = JobRecord(Path(path))
    _OfThisProcess.owner = os.getpid()
    _OfThisProcess.last_error = getattr(sys, "last_value", None)
    _OfThisProcess.writes = writes
    atexit.unregister(note_good_end)
    atexit.register(note_good_end)


def record_of_this_job() -> JobRecord | None:
    """The record, if `launch` has started this job."""
    return _OfThisProcess.record


def note_good_end() -> None:
    """The program of this process ends, and no guard has seen a failure. Local."""
    # After shutdown() no guard looks.
    failed = getattr(sys, "last_value", None) is not _OfThisProcess.last_error
    if (
        _OfThisProcess.record is not None
        and _OfThisProcess.writes
        and _OfThisProcess.owner == os.getpid()
        and not failed
    ):
        _OfThisProcess.record.write(FINISHED)
