"""One run of program.py with ranks killed at moments, and which ranks to kill when."""

import os
import random
import re
import signal
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from support.job import OPEN_MPI_SETTINGS, Job, start_job

PROGRAM = Path(__file__).with_name("program.py")
FLAGS = ("--with-ft", "ulfm")
LOST = re.compile(r"commit (\d+): the model.buffers of ranks .* are lost")
SECONDS = re.compile(r"commit \d+, ([\d.]+) s after it was noticed")


def run_once(
    ranks: int,
    spares: int,
    steps: int,
    kills: list[tuple[float, list[int]]],
    limit: float,
    training: str = "plain",
) -> tuple[Job, list[int], float, list[str]]:
    """Start a job, and kill places at moments (seconds after training began, places).

    What only one rank has is on the disk, too: two neighbours may be lost at once.
    Returns the job, who was killed, for how long it trained, and what it left. Who has its result is not killed: a
    loss after training ends the job as any error does.
    """
    with TemporaryDirectory(prefix="hvlike-kills-") as name:
        folder = Path(name)
        memory = folder / "shm"
        memory.mkdir()
        env = {
            **OPEN_MPI_SETTINGS,
            "OMPI_MCA_btl_sm_backing_directory": str(memory),
            "OMP_NUM_THREADS": "1",
            "HVLIKE_SPARES": str(spares),
        }
        if training != "plain":
            env |= {"HVLIKE_CHECKPOINT_DIR": str(folder / "commits"), "HVLIKE_CHECKPOINT_SECONDS": "0"}
        killed: list[int] = []
        with start_job(PROGRAM, ranks + spares, env=env, args=[str(steps), name, training], flags=FLAGS) as job:
            job.wait_for_output("COMMIT", limit)
            began = time.monotonic()
            for moment, places in kills:
                time.sleep(max(0.0, began + moment - time.monotonic()))
                alive = job.pids()
                for place in places:
                    process = int((folder / f"process-{place}").read_text())
                    if process in alive and "RESULT" not in job.output():
                        os.kill(process, signal.SIGKILL)
                        killed.append(place)
            if not kills:
                job.wait_for_output("RESULT", limit)
            seconds = time.monotonic() - began
            ended = job.wait(limit)
        left = [f"/dev/shm/{each}" for each in os.listdir("/dev/shm") if each.startswith("hvlike")]
        return ended, killed, seconds, left


def plan_kills(
    choice: random.Random, ranks: int, spares: int, seconds: float
) -> tuple[str, list[tuple[float, list[int]]]]:
    """Who is killed when: at least one process that trains is left."""
    moment = choice.uniform(0.0, seconds)
    places = list(range(ranks + spares))
    most = ranks + spares - 1
    kind = choice.choice(["single", "double", "cascade"] if most > 1 else ["single"])
    if kind == "single":
        return kind, [(moment, choice.sample(range(ranks), 1))]
    if kind == "double":
        return kind, [(moment, choice.sample(places, 2))]
    chosen = choice.sample(places, min(most, choice.choice([2, 3])))
    times = sorted(moment + choice.uniform(0.0, 0.4) for _ in chosen)
    return kind, [(when, [place]) for when, place in zip(times, chosen, strict=True)]
