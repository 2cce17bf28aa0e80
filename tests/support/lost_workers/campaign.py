"""One job of the campaign: which rank is killed when, and how the survivors have ended."""

import os
import random
import re
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from support.job import start_job

PROGRAM = Path(__file__).parent / "program.py"
MOMENTS = ("at work", "in shutdown", "in init_rpc", "as it sends")
FILES = "OMPI_MCA_btl_sm_backing_directory"
"""Where Open MPI keeps files that a killed rank leaves behind: not in /dev/shm here."""


@dataclass(frozen=True)
class Loss:
    """A job, and the rank that is killed in it."""

    seed: int
    ranks: int
    victim: int
    moment: str
    delay: float
    """Seconds from the moment when the rank is ready to be killed."""

    def __str__(self) -> str:
        return f"seed {self.seed}: rank {self.victim} of {self.ranks}, {self.moment}, after {self.delay:.2f} s"


@dataclass(frozen=True)
class Outcome:
    """What the survivors said."""

    worst: float
    """Seconds of the longest operation of any survivor."""
    errors: int
    """How many operations have ended with the loss."""
    launcher_stays: bool
    """mpirun had to be killed after its processes had ended."""
    wrong: str
    """Empty: all survivors have ended as they must."""


def draw(seed: int) -> Loss:
    """The loss of this number."""
    chance = random.Random(seed)
    ranks = chance.randint(2, 4)
    moment = chance.choices(MOMENTS, (7, 2, 1, 3))[0]
    return Loss(seed, ranks, chance.randrange(ranks), moment, chance.uniform(0, 1.5))


def run(loss: Loss, timeout: float = 120, between: Sequence[str] = ()) -> Outcome:
    """Run the job and kill the rank. Never raises for what the job does. between: a command that starts each rank."""
    arguments = [str(loss.seed), loss.moment, str(loss.victim)]
    with (
        tempfile.TemporaryDirectory(prefix="hvlike-lost-") as folder,
        start_job(
            PROGRAM, loss.ranks, env={FILES: folder}, args=arguments, flags=["--with-ft", "ulfm"], between=between
        ) as running,
    ):
        running.wait_for_output("READY", timeout)
        time.sleep(loss.delay)
        if loss.moment != "as it sends":  # Then it kills itself
            os.kill(int(running.output().split()[1]), signal.SIGKILL)
        until = time.monotonic() + timeout
        while running.pids() and time.monotonic() < until:
            time.sleep(0.1)
        # Open MPI's launcher now and then stays although all its processes have ended.
        ended = not running.pids()
        job = running.wait(15 if ended else 1)
    said = re.findall(r"SURVIVED .* worst ([\d.]+) s, (\d+) errors", job.stdout)
    wrong = "" if len(said) == loss.ranks - 1 and ended and not job.survivors else job.describe()
    worst = max((float(worst) for worst, _ in said), default=0.0)
    return Outcome(worst, sum(int(each) for _, each in said), job.timed_out, wrong)
