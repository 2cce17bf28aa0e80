"""One training under `launch` that is disturbed from outside, and what it leaves."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path

from support.hosts import Hosts
from support.job import IS_OPEN_MPI, LAUNCHER, MARK, OPEN_MPI_FLAGS, job_environment, marked_processes, run_job

from hvlike.training.elastic.checkpoint_files import digest_of

PROGRAM = Path(__file__).with_name("program.py")
STEPS = 60
ARGUMENTS = ("--pause", "0.03")
_LIMIT_SECONDS = 240.0
_CHECKPOINT_SECONDS = 150.0  # To the next one, a restart included
_PREEMPTED = 75
_TOO_EARLY = -signal.SIGUSR1, -signal.SIGTERM  # Python was still starting: nothing has begun


@dataclass(frozen=True)
class Outcome:
    """What was done to a run, and what was wrong with it: nothing, mostly."""

    events: tuple[str, ...]
    faults: tuple[str, ...]
    digest: str
    seconds: float = 0.0

    def compared(self, digest: str, seconds: float) -> "Outcome":
        """Return it with the time it took, and a fault if the result has other bits."""
        wrong = () if self.digest == digest else (f"result {self.digest[:12]!r}, expected {digest[:12]!r}",)
        return replace(self, faults=self.faults + wrong, seconds=seconds)

    def __str__(self) -> str:
        return f"{', '.join(self.events)}: {'; '.join(self.faults) or 'the same bits'}, {self.seconds:.1f} s"


def reference(ranks: int, folder: Path) -> str:
    """Return the result of a run that nobody disturbs."""
    result = folder / f"undisturbed-{ranks}"
    run_job(PROGRAM, ranks, args=[str(STEPS), str(result)]).check()
    return result.read_text()


@dataclass
class Disturbed:
    """A training of PROGRAM under launch, with its own checkpoint folder."""

    ranks: int
    folder: Path
    chance: random.Random
    victims: tuple[str, ...] = ("a rank", "the last", "mpirun", "mpirun and all ranks")
    asks: int = 2
    machines: Hosts | None = None  # One rank on each; by default all are on this one
    events: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    token: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        # Places of its own, so that what is left there is its: other jobs run on this machine.
        self._places = [self.folder / name for name in ("memory", "temporary")]
        for place in self._places:
            place.mkdir()

    def restarts(self) -> Outcome:
        """Kill something one to three times, damage the newest checkpoint each time."""
        launch = self._start()
        for _ in range(self.chance.choice([1, 1, 2, 3])):
            if self._wait_for_checkpoint(launch):
                time.sleep(self.chance.uniform(0, 1.5))
                self._kill(launch)
        self._finish(launch)
        return self._outcome()

    def preemptions(self) -> Outcome:
        """Ask the job to end at a random moment, start it again, until it has finished."""
        for starts in range(20):
            launch = self._start()
            # The first time at any moment, later at some that come after elastic.run has begun.
            if starts < self.asks:
                if self.chance.random() < 0.8:
                    self._wait_for_checkpoint(launch)
                time.sleep(self.chance.uniform(0, 1.5))
                self._ask(launch)
            if self._finish(launch) not in (_PREEMPTED, *_TOO_EARLY):
                break
        return self._outcome()

    def _start(self) -> "subprocess.Popen[bytes]":
        memory, temporary = map(str, self._places)
        own = {MARK: self.token, "HVLIKE_CHECKPOINT_SECONDS": "0"}
        own |= {"TMPDIR": temporary, "OMPI_MCA_btl_sm_backing_directory": memory}
        launch = [sys.executable, "-m", "hvlike", "launch", "--restarts", "6"]
        launch += ["--checkpoint", str(self.folder / "commits"), "--"]
        program = [sys.executable, str(PROGRAM), str(STEPS), str(self.folder / "result"), *ARGUMENTS]
        if self.machines is None:
            job = [str(LAUNCHER), *(OPEN_MPI_FLAGS if IS_OPEN_MPI else ()), "-n", str(self.ranks)]
            command, environment = [*launch, *job, *program], job_environment(own)
        else:
            command = self.machines.launch(program, 1, self.folder, above=launch)
            environment = self.machines.environment(own)
        with (self.folder / "output").open("ab") as output:
            return subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def _files(self) -> list[Path]:
        return sorted((self.folder / "commits").glob("checkpoint-*.pt"))

    def _wait_for_checkpoint(self, launch: "subprocess.Popen[bytes]") -> bool:
        """Wait until the job writes a new one; False if it ends before."""
        seen, until = set(self._files()), time.monotonic() + _CHECKPOINT_SECONDS
        while not set(self._files()) - seen:
            if launch.poll() is not None:
                return False
            if time.monotonic() > until:
                said = (self.folder / "output").read_text()
                self.faults.append(f"no checkpoint for {_CHECKPOINT_SECONDS} s:\n{said}")
                launch.kill()
                return False
            time.sleep(0.05)
        return True

    def _job(self, launch: "subprocess.Popen[bytes]") -> tuple[list[int], list[int]]:
        """Process ids of mpirun, and of its ranks in order."""
        # Between them is the process that outlives its caller (hvlike/launch/supervisor.py).
        mpirun = [each for supervisor in children(launch.pid) for each in children(supervisor)]
        below = [child for each in mpirun for child in children(each)]
        # MPICH's has a daemon on each node, this one too.
        return mpirun, below if IS_OPEN_MPI else sorted(rank for each in below for rank in children(each))

    def _kill(self, launch: "subprocess.Popen[bytes]") -> None:
        mpirun, ranks = self._job(launch)
        aims = {"a rank": ranks[:1], "the last": ranks[-1:], "mpirun": mpirun, "mpirun and all ranks": mpirun + ranks}
        if self.machines is not None:
            aims["a daemon"] = self.machines.daemons(1)
        what = self.chance.choice(self.victims)
        for pid in aims[what]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # Until a rank that writes at this moment has noticed.
        time.sleep(0.5)
        files = self._files()
        damage = ""
        # Without a whole one elastic.run raises an error, rather than begin at the beginning.
        if aims[what] and sum(map(is_whole, files)) > 1:
            damage = self.chance.choice([" and flipped a bit", " and cut the file", ""])
            damaged(files[-1], damage)
        self.events.append(f"killed {what if aims[what] else 'nothing'}{damage}")

    def _ask(self, launch: "subprocess.Popen[bytes]") -> None:
        mpirun, ranks = self._job(launch)
        number = self.chance.choice([signal.SIGTERM, signal.SIGUSR1])
        aims = {"launch": [launch.pid], "mpirun": mpirun, "rank 0": ranks[:1], "the last": ranks[-1:], "all": ranks}
        aim = self.chance.choice(list(aims))
        for pid in aims[aim]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        self.events.append(f"{number.name} to {aim}")

    def _finish(self, launch: "subprocess.Popen[bytes]") -> int:
        try:
            status = launch.wait(_LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            self.faults.append("it hung")
            status = -1
        self.events.append(str(status))
        if status not in (0, _PREEMPTED, *_TOO_EARLY):
            self.faults.append(f"launch ended with {status}")
        left = marked_processes(self.token)
        if left:
            self.faults.append(f"left {len(left)} processes: {list(left.values())}")
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        launch.wait()
        # A daemon that is killed leaves its folder on its host.
        new = [path for place in self._places for path in place.iterdir() if not path.name.startswith("prted.")]
        new += (self.folder / "commits").glob(".launch*")
        if new:
            self.faults.append(f"left {sorted(map(str, new))}")
        return status

    def _outcome(self) -> Outcome:
        result = self.folder / "result"
        if self.faults:
            print((self.folder / "output").read_text(errors="replace")[-4000:], file=sys.stderr)
        return Outcome(tuple(self.events), tuple(self.faults), result.read_text() if result.exists() else "none")


def children(pid: int) -> list[int]:
    """The child processes that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = path.read_text(errors="replace").rpartition(")")[2].split()[:2]
            if int(parent) == pid and state != "Z":
                found.append(int(path.parent.name))
    return sorted(found)


def is_whole(file: Path) -> bool:
    """Whether its contents fit its name."""
    return file.exists() and digest_of(file.read_bytes()) in file.name


def damaged(file: Path, how: str) -> None:
    """Damage a file as disks do."""
    with contextlib.suppress(FileNotFoundError):
        data = bytearray(file.read_bytes())
        if "bit" in how:
            data[len(data) // 2] ^= 1
            file.write_bytes(data)
        elif "cut" in how:
            file.write_bytes(data[: len(data) // 3])
