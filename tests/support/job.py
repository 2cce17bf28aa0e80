"""Whole jobs for tests: start a program under mpirun, watch it, and never leave a process of it behind."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
STARTUP = CHECKOUT / "tests" / "startup"
LAUNCHER = Path(sys.executable).parent / "mpirun"
IS_OPEN_MPI = (LAUNCHER.parent / "ompi_info").exists()

# A program that is `python -m hvlike`.
MODULE = "import runpy, sys; sys.argv[0] = 'hvlike'; runpy.run_module('hvlike', run_name='__main__', alter_sys=True)"

# Every process of a job carries this variable, so that it is found again whatever group or session it moved to.
MARK = "HVLIKE_TEST_JOB"

OPEN_MPI_FLAGS = ("--oversubscribe", "--bind-to", "none")
OPEN_MPI_SETTINGS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,sm",
}
WRAPPERS = {
    "nothing": [],
    "a shell": ["bash", "-c", '"$@"; exit $?', "bash"],
    "Python": [sys.executable, "-c", "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)"],
    "timeout": ["timeout", "500"],
    "taskset": ["taskset", "-c", ",".join(map(str, sorted(os.sched_getaffinity(0))))],
}
"""What stands between launcher and rank; all but the first and the last (it makes way) hide the end of the rank."""

# Set for the ranks of the run that we belong to; a job started from there must not inherit them.
OUTER_PREFIXES = ("HVLIKE_TEST_RECORDS", "HVLIKE_TEST_PART", "HVLIKE_TEST_TURNS", "PYTEST_")
OUTER_PREFIXES += ("OMPI_COMM_WORLD_", "PMIX_", "PMI_", "PRTE_MCA_", "HYDI_", "HYDRA_")
# Dying takes time on a busy machine; who has no survivors does not wait for it.
SURVIVOR_SECONDS = 10.0
STACKS_SECONDS = 2.0


@dataclass(frozen=True)
class Job:
    """What a finished job left: its output, and the command lines of processes that outlived mpirun."""

    command: tuple[str, ...]
    returncode: int
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool
    survivors: tuple[str, ...]

    def check(self) -> "Job":
        """Return self when the job ended with 0 and left no process; otherwise raise AssertionError with its output."""
        if self.returncode or self.timed_out or self.survivors:
            raise AssertionError(self.describe())
        return self

    def describe(self) -> str:
        """Everything a person needs to see what went wrong."""
        ending = "timed out" if self.timed_out else f"ended with {self.returncode}"
        return (
            f"{' '.join(self.command)}\n{ending} after {self.seconds:.1f} s, survivors: {list(self.survivors)}\n"
            f"--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"
        )


class RunningJob:
    """A job that was started and not yet waited for. Use as a context manager, or call wait()."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        self._token = uuid.uuid4().hex
        self._folder = folder
        self._command = tuple(command)
        self._start = time.monotonic()
        # Files, not pipes: a process that outlives mpirun would keep a pipe open and block the reader.
        with (folder / "stdout").open("wb") as stdout, (folder / "stderr").open("wb") as stderr:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                # A launcher that is killed leaves its session's folder, named by its pid: in a common place the next
                # one that is given this pid would fail ("The PMIx server's listener thread failed to start").
                env={**environment, MARK: self._token, "TMPDIR": str(folder)},
                start_new_session=True,
            )

    def __enter__(self) -> "RunningJob":
        return self

    def __exit__(self, *exception: object) -> None:
        self._kill_all()
        # Who has just been killed may still be at work in there.
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def is_running(self) -> bool:
        """Whether the launcher has not ended."""
        return self._process.poll() is None

    @property
    def folder(self) -> Path:
        """What the job has for temporary files; its output and the program are there, too."""
        return self._folder

    @property
    def launcher_pid(self) -> int:
        """The process id of mpirun."""
        return self._process.pid

    def output(self) -> str:
        """What the job has printed to stdout so far."""
        return (self._folder / "stdout").read_text(errors="replace")

    def errors(self) -> str:
        """What the job has printed to stderr so far."""
        return (self._folder / "stderr").read_text(errors="replace")

    def pids(self) -> dict[int, str]:
        """Live processes of the job except mpirun itself: pid -> command line."""
        return {pid: line for pid, line in marked_processes(self._token).items() if pid != self.launcher_pid}

    def wait_for_output(self, text: str, timeout: float = 60) -> None:
        """Wait until the job has printed `text` to stdout; AssertionError when it ends or time runs out first."""
        end = time.monotonic() + timeout
        while text not in self.output():
            if self._process.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"{text!r} was not printed\n{self.output()}\n{self.errors()}")
            time.sleep(0.02)

    def wait(self, timeout: float = 100) -> Job:
        """Wait for mpirun to end, kill what is left of the job after a short grace, and return the record of it."""
        timed_out = False
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            timed_out = True
            self._print_stacks()
        seconds = time.monotonic() - self._start
        survivors = () if timed_out else self._survivors()
        self._kill_all()
        returncode = self._process.returncode
        return Job(self._command, returncode, self.output(), self.errors(), seconds, timed_out, survivors)

    def _survivors(self) -> tuple[str, ...]:
        end = time.monotonic() + SURVIVOR_SECONDS
        while self.pids() and time.monotonic() < end:
            time.sleep(0.05)
        return tuple(self.pids().values())

    def _print_stacks(self) -> None:
        """Make every hanging rank print where it is: faulthandler answers SIGABRT with all stacks."""
        for pid, line in self.pids().items():
            if "python" in line:
                _send(pid, signal.SIGABRT)
        time.sleep(STACKS_SECONDS)

    def _kill_all(self) -> None:
        for pid in marked_processes(self._token):
            _send(pid, signal.SIGKILL)
        self._process.wait()


def start_job(
    program: str | Path,
    ranks: int,
    *,
    env: Mapping[str, str] | None = None,
    args: Sequence[str] = (),
    flags: Sequence[str] = (),
    between: Sequence[str] = (),
    setup: str = "",
) -> RunningJob:
    """Start a Python program on `ranks` ranks and return at once.

    program: a path, or the text of the program.
    env: variables added to the environment. args: the program's arguments. flags: more arguments for mpirun. between: a
    command that starts each rank.
    setup: shell commands that run first, in a mount namespace that only this job sees; needs root.
    """
    folder = Path(tempfile.mkdtemp(prefix="hvlike-job-"))
    if isinstance(program, str):
        path = folder / "program.py"
        path.write_text(program)
    else:
        path = program
    vendor_flags = OPEN_MPI_FLAGS if IS_OPEN_MPI else ()
    command = [str(LAUNCHER), *vendor_flags, *flags, "-n", str(ranks), *between, sys.executable, str(path), *args]
    if setup:
        command = ["unshare", "--mount", "bash", "-ec", f'{setup}; exec "$@"', "bash", *command]
    return RunningJob(command, job_environment(env or {}), folder)


def run_job(
    program: str | Path,
    ranks: int,
    *,
    env: Mapping[str, str] | None = None,
    timeout: float = 100,
    args: Sequence[str] = (),
    flags: Sequence[str] = (),
    between: Sequence[str] = (),
) -> Job:
    """Run a Python program on `ranks` ranks to its end; arguments as for start_job. Never raises for a failed job."""
    with start_job(program, ranks, env=env, args=args, flags=flags, between=between) as job:
        return job.wait(timeout)


def job_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of a job: ours without what belongs to an outer run, with the settings for one host."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(OUTER_PREFIXES)}
    path = os.pathsep.join(filter(None, [str(CHECKOUT), str(STARTUP), environment.get("PYTHONPATH")]))
    environment |= {"PYTHONPATH": path, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    if IS_OPEN_MPI:
        environment |= OPEN_MPI_SETTINGS
    return environment | extra


def marked_processes(token: str) -> dict[int, str]:
    """Live processes whose environment carries the job's token: pid -> command line."""
    found = {}
    wanted = f"{MARK}={token}".encode()
    for entry in Path("/proc").iterdir():
        # A process may end, or belong to another user, while we look at it.
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return found


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
