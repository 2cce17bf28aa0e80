"""One attempt of a job that `launch` starts: it runs, is asked to end or ended, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

from hvlike.errors import LaunchError
from hvlike.launch.processes import end_descendants, end_with_parent, remove_segments, segment_folder
from hvlike.launch.run import stop
from hvlike.transport.failure.job_record import VARIABLE, JobRecord
from hvlike.transport.host.find_mpirun import OPEN_MPI, examine_launcher

_POLL_SECONDS = 0.2
ORPHAN_SECONDS = 5.0  # How long ranks have that lost their launcher: they look about once a second
_OPEN_MPI_NAMES = ("mpirun", "mpiexec", "orterun", "prterun")
_SESSION_FOLDERS = ("PRTE_MCA_prte_tmpdir_base", "PRTE_MCA_prte_local_tmpdir_base")


def say(text: str) -> None:
    print(f"hvlike launch: {text}", file=sys.stderr, flush=True)


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
            remove_segments(started, segment_folder())
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


def environment_of(record: Path, checkpoint: str | None) -> dict[str, str]:
    """The environment of the job."""
    added = {VARIABLE: str(record)} | ({} if checkpoint is None else {"HVLIKE_CHECKPOINT_DIR": checkpoint})
    return dict(os.environ) | added
