"""One run of program.py with ranks killed at moments, and which ranks to kill when."""

import contextlib
import os
import random
import re
import signal
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from support.hosts import Hosts
from support.job import Job, RunningJob, start_job

PROGRAM = Path(__file__).with_name("program.py")
FLAGS = ("--with-ft", "ulfm")
LOST = re.compile(r"commit (\d+): the model.buffers of ranks .* are lost")
SECONDS = re.compile(r"commit \d+, ([\d.]+) s after it was noticed")
CUT = "cut"
_HEARTBEAT_SECONDS = 3


def run_once(
    ranks: int,
    spares: int,
    steps: int,
    kills: list[tuple[float, list[int]]],
    limit: float,
    training: str = "plain",
    machines: Hosts | None = None,
    *,
    cut: bool = False,
) -> tuple[Job, list[int], float, list[str]]:
    """Start a job, and kill places at moments (seconds after training began, places).

    What only one rank has is on the disk, too: two neighbours may be lost at once.
    machines: two hosts that share the ranks, else all are here. cut: the link of the second host is cut at these
    moments, and its places count as killed.
    Returns the job, who was killed, for how long it trained, and what it left. Who has its result is not killed: a
    loss after training ends the job as any error does.
    """
    with TemporaryDirectory(prefix="hvlike-kills-") as name:
        folder = Path(name)
        memory = folder / "shm"
        memory.mkdir()
        env = {"OMPI_MCA_btl_sm_backing_directory": str(memory), "HVLIKE_SPARES": str(spares)}
        if training != "plain":
            env |= {"HVLIKE_CHECKPOINT_DIR": str(folder / "commits"), "HVLIKE_CHECKPOINT_SECONDS": "0"}
        args = [str(steps), name, training]
        if machines is None:
            started = start_job(PROGRAM, ranks + spares, env=env, args=args, flags=FLAGS)
        else:
            # A busy machine may keep a host silent for as long: only where nothing else notices.
            env |= {"HVLIKE_HEARTBEAT_SECONDS": str(_HEARTBEAT_SECONDS)} if cut else {}
            started = machines.start(PROGRAM, ranks_per_host(ranks + spares), env=env, args=args, flags=FLAGS)
        killed: list[int] = []
        with started as job:
            job.wait_for_output("COMMIT", limit)
            began = time.monotonic()
            for moment, places in kills:
                time.sleep(max(0.0, began + moment - time.monotonic()))
                alive = job.pids()
                processes = {place: int((folder / f"process-{place}").read_text()) for place in places}
                aims = [place for place, process in processes.items() if process in alive]
                if "RESULT" not in job.output():
                    if cut and machines is not None:
                        machines.cut(1)
                    else:
                        for place in aims:
                            os.kill(processes[place], signal.SIGKILL)
                    killed += aims
            if not kills:
                job.wait_for_output("RESULT", limit)
            seconds = time.monotonic() - began
            if cut and killed:
                _end_launcher(job, limit)
            ended = job.wait(limit)
        left = [f"/dev/shm/{each}" for each in os.listdir("/dev/shm") if each.startswith("hvlike")]
        return ended, killed, seconds, left


def ranks_per_host(ranks: int) -> list[int]:
    """How two hosts share them: the first has one more."""
    return [ranks - ranks // 2, ranks // 2]


def _end_launcher(job: RunningJob, limit: float) -> None:
    """Wait for the programs on both sides of a cut link to end, then end the launcher: it does not, by itself."""
    end = time.monotonic() + limit
    while any(line.startswith(sys.executable) for line in job.pids().values()):
        if time.monotonic() > end:
            return
        time.sleep(0.05)
    for process in [job.launcher_pid, *job.pids()]:
        # Those below another one may go with it.
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


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


def plan_cut(choice: random.Random, ranks: int, seconds: float) -> tuple[str, list[tuple[float, list[int]]]]:
    """When the link of the second host is cut, and who is there."""
    return CUT, [(choice.uniform(0.0, seconds), list(range(ranks_per_host(ranks)[0], ranks)))]
