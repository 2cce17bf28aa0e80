"""One attempt of a job that is started from Python: it runs, is asked to end or ended, and leaves nothing behind.

`hvd.run` and `launch` start their jobs here, below a process that outlives them: the supervisor.
"""

from __future__ import annotations

import contextlib
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
from hvlike.launch import supervisor
from hvlike.observe import printing
from hvlike.transport.failure.exit_status import VARIABLE, JobRecord
from hvlike.transport.host.find_mpirun import examine_launcher
from hvlike.transport.host.launcher_table import STARTING
from hvlike.transport.host.mpi_library import SHM_FOLDER

_POLL_SECONDS = 0.2
ORPHAN_SECONDS = 5.0  # How long ranks have that lost their launcher: they look about once a second
_END_SECONDS = supervisor.STOP_SECONDS + ORPHAN_SECONDS + 15.0  # Until a supervisor that was told to end is killed
_TO_BE_TOLD = frozenset(name for row in STARTING.values() if row.export for name in row.commands)
_SESSION_FOLDERS = ("PRTE_MCA_prte_tmpdir_base", "PRTE_MCA_prte_local_tmpdir_base")
_SEGMENT_FOLDER = "OMPI_MCA_btl_sm_backing_directory"


def say(text: str) -> None:
    printing.write(f"hvlike launch: {text}")


@dataclass
class Requests:
    """The signals that have asked this process to end, in order of arrival."""

    signals: list[int] = field(default_factory=list)
    _previous: dict[int, Any] = field(default_factory=dict)

    def __enter__(self) -> Requests:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
            # nohup has it ignored.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
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
    if Path(first).name not in _TO_BE_TOLD:
        return list(command)
    try:
        family = examine_launcher(first).family
    except LaunchError:
        return list(command)
    export = STARTING[family].export if family in STARTING else ""
    given = {word.partition("=")[0] for flag, word in pairwise(rest) if flag == export}
    added = [word for name in names if export and name not in given for word in (export, name)]
    return [first, *added, *rest]


class Attempt:
    """A job that runs below a supervisor. Use as a context manager: it has ended to its last process afterwards."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], remove: Sequence[str], **how: Any
    ) -> None:
        """remove: files and folders of this process that go, should it be killed. how: keywords of Popen.

        Raises: OSError, if the command cannot be run.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="hvlike-launch-", ignore_cleanup_errors=True)
        folder = self._folder.name
        # An mpirun that is killed leaves its files.
        places = {} if any(name in environment for name in _SESSION_FOLDERS) else {_SESSION_FOLDERS[1]: folder}
        self._refused = Path(folder) / "refused"
        options = {
            "--caller": os.getpid(),
            "--patience": ORPHAN_SECONDS,
            "--segments": environment.get(_SEGMENT_FOLDER, SHM_FOLDER),
            "--refused": self._refused,
        }
        flags = [str(word) for pair in options.items() for word in pair]
        flags += [word for path in (folder, *remove) for word in ("--remove", path)]
        self.process = subprocess.Popen(
            # Nothing of the environment changes how it runs, nor a program that has put a wrapper into sys.executable.
            [
                getattr(sys, "_base_executable", None) or sys.executable,
                "-I",
                "-S",
                supervisor.__file__,
                *flags,
                "--",
                *command,
            ],
            stdin=subprocess.DEVNULL,
            env={**environment, **places},
            start_new_session=True,
            **how,
        )

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.end()
        finally:
            self._folder.cleanup()

    def wait(self, seconds: float | None = None) -> int:
        """Wait for the end; the launcher's status, negative for a signal.

        Raises: subprocess.TimeoutExpired; OSError, if the command cannot be run.
        """
        status = self.process.wait(seconds)
        if self._refused.exists():
            number, text, path = self._refused.read_text().split("\n", 2)
            raise OSError(int(number), text, path)
        return status

    def end(self) -> None:
        """End the job, at once if this is interrupted, or if it does not end in time."""
        if self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(_END_SECONDS)
        except BaseException as error:
            # A second Ctrl-C: ranks are killed.
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_END_SECONDS)
            self.process.kill()
            self.process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise


def run_attempt(
    command: Sequence[str],
    environment: Mapping[str, str],
    requests: Requests,
    grace: float,
    remove: Sequence[str] = (),
) -> int:
    """Run the job to its end and return its launcher's status, negative for a signal. Blocks.

    The first request is passed on through the job's record; the job has `grace` seconds to end by itself. After that,
    and at a second request, its launcher is ended. All its processes on this node have ended on return. remove: as for
    Attempt. Raises: OSError, if the command cannot be run.
    """
    with Attempt(command, environment, remove) as attempt:
        _watch(attempt, JobRecord(Path(environment[VARIABLE])), requests, grace)
    return attempt.wait()


def _watch(attempt: Attempt, record: JobRecord, requests: Requests, grace: float) -> None:
    ends_at = None
    while True:
        try:
            attempt.wait(_POLL_SECONDS)
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
