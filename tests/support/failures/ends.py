"""The matrix of ends: how a rank fails, behind which streams, what stands between launcher and rank, who started it.

Every pair of values of two of these is in `pairs()`; `product()` has all. docs/failures.md has the table.
"""

import itertools
import os
import random
import re
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from support.failures import ends_program
from support.job import IS_OPEN_MPI, LAUNCHER, OPEN_MPI_FLAGS, WRAPPERS, Job, RunningJob, job_environment

LIMIT_SECONDS = 60.0
"""From the failure to the end of all processes; a busy machine needs more than the 10 s of a quiet one."""
START_SECONDS = 100.0

HOW = (
    *(
        "raise",
        "exit status",
        "interrupt",
        "thread",
        "MemoryError",
        "SIGKILL",
        "SIGSEGV",
        "SIGTERM",
        "SIGSTOP",
        "leaves",
    ),
    *("mpirun killed", "Ctrl-C", "caller killed"),
)
STREAMS = (
    *("plain", "Tee without closed", "no flush", "closed", "ASCII only", "None", "raising", "a full disk"),
    "a broken pipe",
)
# MPICH tells a rank of its job through an open descriptor, which Python's subprocess closes.
BETWEEN = (*(each for each in WRAPPERS if IS_OPEN_MPI or each != "Python"), "a shell and timeout")
START = ("plain", "ulfm", "launch", "run") if IS_OPEN_MPI else ("plain", "launch", "run")
STARTED = {"plain": "`mpirun`", "ulfm": "`--with-ft ulfm`", "launch": "`launch`", "run": "`hvd.run`"}

FROM_OUTSIDE = ("mpirun killed", "Ctrl-C", "caller killed")
GOES_ON = ("raise", "exit status", "interrupt", "MemoryError", "SIGKILL", "SIGSEGV", "SIGTERM", "SIGSTOP", "leaves")
"""Under fault tolerance the others go on; SIGSTOP ends with SIGKILL after HVLIKE_HEARTBEAT_SECONDS."""

_SIGNALLED = (
    r"on\s+signal \d+|vanished without a word|EXIT CODE: \d+|ended with status -?\d+|[Nn]on-zero (?:status|exit)"
)
REPORTS = {
    "raise": r"^ ?hvlike: uncaught exception on rank 1 of \d",
    "exit status": r"^ ?hvlike: rank 1 of \d on \S+ ended with status 7",
    "interrupt": r"^ ?hvlike: uncaught exception on rank 1 of \d",
    "thread": r"^ ?hvlike: uncaught exception in thread loader on rank 1 of \d",
    "MemoryError": r"^ ?hvlike: uncaught exception on rank 1 of \d",
    "SIGSEGV": r"^ ?Fatal Python error: Segmentation fault",
    "SIGSTOP": r"^ ?hvlike: uncaught exception on rank 0 of \d",
    "leaves": r"^ ?hvlike: uncaught exception on rank 0 of \d",
}
_ANY_REPORT = r"^ ?hvlike: (?:uncaught exception|rank \d+ of \d+ on \S+ ended)"
_LEFT = r"^ ?hvlike: rank 1 of \d on \S+ has left elastic.run while other ranks train"
CAUSES = {
    "raise": r"^ValueError: boom gr(?:öße|\\xf6\\xdfe)$",
    "interrupt": r"^KeyboardInterrupt$",
    "thread": r"^ZeroDivisionError: ",
    "MemoryError": r"^MemoryError",
    "SIGSTOP": r"StalledError: ",
    "leaves": r"PeerLeftError: ",
    "SIGKILL": _SIGNALLED,
    "SIGTERM": _SIGNALLED,
}
STATUSES = {"raise": 1, "exit status": 7, "interrupt": 130, "thread": 1, "MemoryError": 1, "SIGSTOP": 1, "leaves": 1}


@dataclass(frozen=True)
class End:
    """One cell."""

    how: str
    streams: str
    between: str
    start: str

    def __str__(self) -> str:
        return f"{self.how}, {self.streams}, {self.between}, {self.start}"

    @property
    def is_possible(self) -> bool:
        """Only who starts jobs by Python has a caller besides mpirun."""
        return self.how != "caller killed" or self.start in ("launch", "run")


def product() -> list[End]:
    """All cells."""
    return [end for cell in itertools.product(HOW, STREAMS, BETWEEN, START) if (end := End(*cell)).is_possible]


def pairs(seed: int = 0) -> list[End]:
    """Cells in which every pair of values of two dimensions occurs, in an order of this seed."""
    chance = random.Random(seed)
    open_pairs = {pair for end in product() for pair in _pairs_of(end)}
    cells = product()
    chance.shuffle(cells)
    chosen = []
    while open_pairs:
        best = max(cells, key=lambda end: len(_pairs_of(end) & open_pairs))
        open_pairs -= _pairs_of(best)
        chosen.append(best)
    return chosen


def _pairs_of(end: End) -> set[tuple[tuple[int, str], ...]]:
    values = enumerate((end.how, end.streams, end.between, end.start))
    return set(itertools.combinations(values, 2))


@dataclass(frozen=True)
class Ended:
    """How one has ended, and what is wrong with that; "" if nothing is."""

    end: End
    seconds: float
    status: int
    wrong: str
    text: str


def run_end(end: End) -> Ended:
    """Run it; never raises for what the job does."""
    with tempfile.TemporaryDirectory(prefix="hvlike-ends-") as name:
        folder = Path(name)
        job_folder = folder / "job"
        for each in (job_folder, folder / "shm", folder / "given"):
            each.mkdir()
        with RunningJob(_command(end, folder), _environment(end, folder), job_folder) as running:
            began = _begin(end, running)
            job = running.wait(LIMIT_SECONDS)
            files = _files_left(end, folder)
        seconds = time.time() - (_failed_at(job) or began)
        wrong = [what for what in _faults(end, job, files) if what]
    return Ended(end, seconds, job.returncode, "; ".join(wrong), job.describe())


def _begin(end: End, running: RunningJob) -> float:
    """Wait for the moment of the failure, and cause it where that is done from outside."""
    until = time.monotonic() + START_SECONDS
    while "ready" not in running.output() and running.is_running and time.monotonic() < until:
        time.sleep(0.05)
    if end.how == "mpirun killed":
        for process in _launchers(running):
            os.kill(process, signal.SIGKILL)
    elif end.how in FROM_OUTSIDE:
        os.kill(running.launcher_pid, signal.SIGKILL if end.how == "caller killed" else signal.SIGINT)
    return time.time()


def _launchers(running: RunningJob) -> list[int]:
    """Those of the job's own, which may be the process that was started."""
    found = []
    for process in (running.launcher_pid, *running.pids()):
        try:
            name = Path(f"/proc/{process}/comm").read_text().strip()
        except OSError:
            continue
        if name in ("mpirun", "prterun", "mpiexec", "mpiexec.hydra"):
            found.append(process)
    return found


def _command(end: End, folder: Path) -> list[str]:
    program = [sys.executable, str(ends_program.__file__), end.how, end.streams, end.start, str(folder / "given")]
    wrapper = [*WRAPPERS["a shell"], *WRAPPERS["timeout"]] if end.between not in WRAPPERS else WRAPPERS[end.between]
    # What hvd.run starts in place of Python.
    python = folder / "given" / "python"
    python.write_text(f'#!/bin/sh\n{"" if wrapper else "exec "}{shlex.join([*wrapper, sys.executable])} "$@"\n')
    python.chmod(0o755)
    flags = [*(OPEN_MPI_FLAGS if IS_OPEN_MPI else ()), *(("--with-ft", "ulfm") if end.start == "ulfm" else ())]
    if end.start == "run":
        return program
    mpirun = [str(LAUNCHER), *flags, "-n", "3" if end.start == "ulfm" else "2", *wrapper, *program]
    launch = [sys.executable, "-m", "hvlike", "launch", "--restarts", "1", "--grace", "5", "--"]
    return [*launch, *mpirun] if end.start == "launch" else mpirun


def _environment(end: End, folder: Path) -> dict[str, str]:
    extra = {"OMPI_MCA_btl_sm_backing_directory": str(folder / "shm")}
    if end.how == "SIGSTOP":
        limits = {"HVLIKE_STALL_CHECK_TIME_SECONDS": "1", "HVLIKE_STALL_SHUTDOWN_TIME_SECONDS": "3"}
        extra |= {"HVLIKE_HEARTBEAT_SECONDS": "3"} if end.start == "ulfm" else limits
    return job_environment(extra)


def _failed_at(job: Job) -> float | None:
    marks = [float(mark) for mark in re.findall(r"END ([\d.]+)", job.stdout)]
    return min(marks, default=None)


def _files_left(end: End, folder: Path) -> list[str]:
    """What is left in the folders for temporary files and for shared memory."""
    if end.how == "mpirun killed" and end.start in ("plain", "ulfm"):
        # An mpirun that is killed leaves its session's folder; nobody is there to remove it.
        return sorted(path.name for path in (folder / "shm").iterdir())
    ours = {"stdout", "stderr"}
    places = [*(folder / "job").iterdir(), *(folder / "shm").iterdir()]
    return sorted(path.name for path in places if path.name not in ours)


def _faults(end: End, job: Job, files: Sequence[str]) -> Iterator[str]:
    yield "timed out" if job.timed_out else ""
    yield f"left processes {list(job.survivors)}" if job.survivors else ""
    yield f"left files {list(files)}" if files else ""
    shared = {path for path in re.findall(r"SHARED (\S+)", job.stdout) if Path(path).exists()}
    yield f"left shared memory {sorted(shared)}" if shared else ""
    yield "never came to its failure" if "ready" not in job.stdout else ""
    yield _wrong_status(end, job)
    yield from _wrong_report(end, job)


def _wrong_status(end: End, job: Job) -> str:
    expected: Callable[[int], bool] = lambda status: status != 0  # noqa: E731
    if end.how == "caller killed" or (end.how == "mpirun killed" and end.start in ("plain", "ulfm")):
        expected = lambda status: status == -signal.SIGKILL  # noqa: E731
    elif end.how == "Ctrl-C" and end.start in ("launch", "run"):
        expected = {"launch": 75, "run": -signal.SIGINT}[end.start].__eq__
    elif end.start == "launch":
        expected = (0).__eq__
    elif end.start == "ulfm":
        # Open MPI's status says nothing there.
        expected = lambda status: True  # noqa: E731
    elif end.start == "plain" and end.how in STATUSES and IS_OPEN_MPI:
        expected = STATUSES[end.how].__eq__
    return "" if expected(job.returncode) else f"ended with {job.returncode}"


def _wrong_report(end: End, job: Job) -> Iterator[str]:
    if end.how in FROM_OUTSIDE:
        return
    goes_on = end.start == "ulfm" and end.how in GOES_ON
    if goes_on or end.start == "launch":
        done = job.stdout.count("done\n")
        yield f"{done} ranks are done, not 2" if done != 2 else ""
    if goes_on and end.how in ("SIGKILL", "SIGTERM", "SIGSTOP"):
        yield "the loss is not named" if "vanished" not in job.stderr and end.streams == "plain" else ""
        return
    left = goes_on and end.how == "leaves"
    if end.how in REPORTS:
        count = _count(_LEFT if left else REPORTS[end.how], job)
        yield f"{count} reports" if count != 1 else ""
    others = _count(_ANY_REPORT, job)
    yield f"{others} reports in all" if others > 1 else ""
    if end.how in CAUSES and not left and not _count(CAUSES[end.how], job):
        yield "the cause is not named"


def _count(pattern: str, job: Job) -> int:
    # The caller's exception repeats the last lines, for who catches it.
    said = job.stderr.partition("hvlike.errors.LaunchError: run: the job ended")[0]
    # Open MPI ends its own texts with NUL; MPICH's launcher names signals on stdout.
    said = said.replace("\0", "") + (job.stdout if pattern == _SIGNALLED else "")
    return len(re.findall(pattern, said, re.MULTILINE))
