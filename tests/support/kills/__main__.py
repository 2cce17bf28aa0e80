"""Kill ranks of a training at random moments, again and again, and judge every run.

    PYTHONPATH=tests python -m support.kills --runs 200                  shrink
    PYTHONPATH=tests python -m support.kills --runs 200 --spares 2       hot spares

Each run starts `program.py` under `mpirun --with-ft ulfm` on 2 to 6 ranks and kills one rank, two at once, or several
one after the other, with SIGKILL, at a random moment between the start of training and its end. It prints a line for
each run and a summary, and ends with 1 if anything was wrong. Source: the promises of docs/elastic.md.
"""

import argparse
import os
import random
import re
import signal
import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from support.job import OPEN_MPI_SETTINGS, Job, start_job
from support.kills.judge import Line, commits_of, read_lines, what_is_wrong

PROGRAM = Path(__file__).with_name("program.py")
FLAGS = ("--with-ft", "ulfm")
SECONDS = re.compile(r"commit \d+, ([\d.]+) s after it was noticed")


def run_once(
    ranks: int, spares: int, steps: int, kills: list[tuple[float, list[int]]], limit: float
) -> tuple[Job, list[int], float, list[str]]:
    """Start a job, and kill places at moments (seconds after training began, places).

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
        killed: list[int] = []
        with start_job(PROGRAM, ranks + spares, env=env, args=[str(steps), name], flags=FLAGS) as job:
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


def main() -> None:
    """Run the campaign."""
    parser = argparse.ArgumentParser(description="Kill ranks of trainings at random moments")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--spares", type=int, default=0)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 3, 4, 5, 6])
    parser.add_argument("--limit", type=float, default=120.0, help="seconds after which a job counts as hung")
    options = parser.parse_args()
    seed = random.randrange(10**6) if options.seed is None else options.seed
    choice = random.Random(seed)
    print(f"seed {seed}", flush=True)
    references: dict[int, tuple[dict[int, str], float]] = {}
    bad, recoveries = 0, []
    for number in range(options.runs):
        ranks = choice.choice(options.ranks)
        if ranks not in references:
            job, _, seconds, _ = run_once(ranks, 0, options.steps, [], options.limit)
            lines = read_lines(job.check().stdout)
            references[ranks] = commits_of(lines), seconds
        reference, seconds = references[ranks]
        kind, kills = plan_kills(choice, ranks, options.spares, seconds)
        job, killed, took, left = run_once(ranks, options.spares, options.steps, kills, options.limit)
        lines: list[Line] = read_lines(job.stdout)
        wrong = what_is_wrong(lines, ranks, options.spares, killed, reference)
        wrong += ["hung"] if job.timed_out else []
        wrong += [f"left behind: {each}" for each in (*job.survivors, *left)]
        times = [float(each) for each in SECONDS.findall(job.stderr)]
        recoveries += times
        bad += bool(wrong)
        print(
            f"{number}: {ranks}+{options.spares} ranks, {kind} {kills}, killed {killed}, recovered in {times} s, "
            f"from {took:.1f} s on: {wrong or 'right'}",
            flush=True,
        )
        if wrong:
            print(job.describe(), flush=True)
    if recoveries:
        middle, worst = statistics.median(recoveries), max(recoveries)
        print(
            f"{options.runs} runs, {bad} wrong; {len(recoveries)} recoveries: median {middle:.3f}, worst {worst:.3f} s"
        )
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
