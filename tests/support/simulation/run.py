"""Runs simulated jobs of random programs, and replays one of them: scripts/simulate.

scripts/simulate --seeds 0..2000 --ranks 2..4 --nodes 1..2 --kinds named,join
scripts/simulate --seed 4711 --kinds join --trace
scripts/simulate --scale 128x8
"""

from __future__ import annotations

import argparse
import logging
import math
import multiprocessing
import os
import random
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from support.fuzz.planted import planted
from support.in_loop import check_in_loop
from support.simulation.machine.job import JobEnd, Program, simulate
from support.simulation.machine.simulated_mpi import SimulatedMpi
from support.simulation.machine.store_buffers import Order
from support.simulation.planted import PLANTS
from support.simulation.programs.kinds import KINDS
from support.simulation.scale import show

MOST_SECONDS = 300.0
# For so long all ranks may sleep at once, in jobs that nobody holds up: what is found at the next look around, after
# 0.25 s, was missed.
LONGEST_REST_SECONDS = 0.2
SHORT_HOLD_SECONDS = 0.01
CLOCK_KINDS = ("prompt", "bells")
PROMPT_KINDS = ("named", "calls", "threads", "planned", "join", "autograd", "torch")


@dataclass
class Draw:
    """A job, as its seed decides it."""

    seed: int
    kind: str
    nodes: list[list[int]]
    points_per_switch: float
    holds: list[tuple[int, int, float]]
    shares_cores: bool  # All ranks have one core
    network: dict[str, bool | int]  # Attributes of the simulated MPI
    stores: Order = "at once"
    statements: float = 0.0  # After so many points a thread loses its core between two; 0: never
    acts: list[tuple[int, int, float]] = field(default_factory=list)  # As `holds`, by what others can see of the rank
    late_wakes: float = 0.0  # So many of the threads that wake get a core only after a while

    @classmethod
    def of(cls, seed: int, kinds: Sequence[str], ranks: range, nodes: range) -> Draw:
        """Draw one."""
        draw = random.Random(seed)
        kind = draw.choice(list(kinds))
        size = draw.choice(ranks)
        parts = min(draw.choice(nodes), size)
        cuts = sorted(draw.sample(range(1, size), parts - 1))
        places = [list(range(first, last)) for first, last in zip([0, *cuts], [*cuts, size], strict=True)]
        # A rank that another program holds up, for a turn of the system or for seconds.
        holds = [
            (draw.randrange(20_000), draw.randrange(size), draw.choice([0.002, 0.05, 3.0]))
            for _ in range(draw.choice([0, 0, 1, 3]))
        ]
        network: dict[str, bool | int] = {
            "eager_limit": draw.choice([0, 4096, 4096, 65536, 262144]),
            "senders_must_call": draw.random() < 0.5,
            "roots_run_ahead": draw.random() < 0.5,
            "sockets_tell": draw.random() < 0.7,
        }
        switches = draw.choice([3.0, 10.0, 40.0, 200.0])
        shares_cores = draw.random() < 0.6
        orders: list[Order] = ["at once", "in order", "in order", "reordered"]
        order = draw.choice(orders)
        if draw.random() < 0.5:
            # For longer than any rank waits before it asks who is missing; in short jobs, too.
            holds.append((round(math.exp(draw.uniform(5.5, 9.0))), draw.randrange(size), 4.0))
        statements = draw.choice([0.0, 0.0, 0.0, 30.0, 100.0, 300.0, 1000.0])
        # At what others can see, and not while it looks at what others do, as it does most of the time.
        acts = [
            (round(math.exp(draw.uniform(2.5, 6.5))), draw.randrange(size), draw.choice([0.01, 0.01, 4.0]))
            for _ in range(draw.choice([0, 0, 1, 2]))
        ]
        late_wakes = draw.choice([0.0, 0.0, 0.01, 0.1])
        if kind in CLOCK_KINDS:
            late_wakes = 0.0
            # Others sleep by then, and the clock is still looked at.
            holds, acts = ([(when, rank, SHORT_HOLD_SECONDS) for when, rank, _ in each] for each in (holds, acts))
            statements = max(statements, 300.0 * (statements > 0))
        if kind in ("bells", "board"):
            places = [list(range(size))]
        return cls(seed, kind, places, switches, holds, shares_cores, network, order, statements, acts, late_wakes)

    @property
    def program(self) -> Program:
        """What its kind and seed decide."""
        program: Program = KINDS[self.kind].draw(self.seed, sum(map(len, self.nodes)))
        return program

    def run(self, program: Program | None = None, *, trace: bool = False) -> JobEnd:
        """Run it, with another program perhaps."""
        program = program or self.program
        return simulate(
            program,
            self.nodes,
            self.seed,
            trace=trace,
            points_per_switch=self.points_per_switch,
            most_seconds=MOST_SECONDS,
            holds=self.holds,
            acts=self.acts,
            shares_cores=self.shares_cores,
            stores=self.stores,
            statements=self.statements,
            late_wakes=self.late_wakes,
            prepare=self.prepare,
            **(program.options() if hasattr(program, "options") else {}),
        )

    def prepare(self, mpi: SimulatedMpi) -> None:
        """Set what the network does."""
        for name, value in self.network.items():
            setattr(mpi, name, value)


def what_is_wrong(end: JobEnd, job: Draw) -> str | None:
    """Why a job has not ended as it should; None if it has."""
    if end.violations:
        return "MPI was used wrongly: " + "; ".join(end.violations)
    if end.judge is not None:
        return end.judge(end)
    for rank, outcome in enumerate(end.ranks):
        if outcome.error is not None:
            return f"rank {rank}: {outcome.trace}"
    if end.hang is not None:
        return f"it hangs: {end.hang}"
    if end.died:
        return "an error has ended a thread: " + "\n".join(end.died)
    is_held = any(seconds > SHORT_HOLD_SECONDS for *_, seconds in (*job.holds, *job.acts))
    if end.longest_rest > LONGEST_REST_SECONDS and job.kind in PROMPT_KINDS and not is_held:
        return f"all ranks have slept for {end.longest_rest:.3f} virtual seconds: somebody was not woken"
    if job.kind in CLOCK_KINDS:
        return next((each.result for each in end.ranks if each.result), None)
    return None


def numbers(text: str) -> range:
    """Read 3, or 2..8 with both ends."""
    first, _, last = text.partition("..")
    return range(int(first), int(last or first) + 1)


def main(arguments: Sequence[str]) -> int:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(prog="scripts/simulate", description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=numbers, default=range(1000), help="which jobs: 0..999")
    parser.add_argument("--seed", type=int, help="one job")
    parser.add_argument("--ranks", type=numbers, default=range(2, 5), help="2..4")
    parser.add_argument("--nodes", type=numbers, default=range(1, 4), help="1..3")
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(KINDS), help=", ".join(KINDS))
    parser.add_argument("--minutes", type=float, default=0.0, help="stop after so long; 0: never")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="that run at once")
    parser.add_argument("--faults", type=int, default=0, help="stop after so many; 0: never")
    parser.add_argument("--planted", action="store_true", help="show that faults planted into a copy are found")
    parser.add_argument("--twice", action="store_true", help="run each job again: it must be the same, step by step")
    parser.add_argument("--trace", action="store_true", help="show who did what, in virtual microseconds")
    parser.add_argument("--scale", metavar="HOSTSxRANKS", help="count the control messages of a job of this size")
    given = parser.parse_args(arguments)
    if os.environ.get("PYTHONHASHSEED") != "0":
        # Else the order of sets, and with it the job, is another one every time.
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"})
    torch.set_num_threads(1)
    check_in_loop()
    warnings.simplefilter("ignore")
    logging.getLogger("hvlike").addFilter(lambda record: given.trace)
    if given.scale:
        hosts, _, ranks = given.scale.partition("x")
        print(show(int(hosts), int(ranks)))
        return 0
    if given.planted:
        return find_planted(arguments)
    seeds = given.seeds if given.seed is None else range(given.seed, given.seed + 1)
    began, failed, ran = time.monotonic(), 0, 0
    for report in run_all(seeds, given, began + 60 * (given.minutes or math.inf)):
        ran += report is not None
        if report:
            failed += 1
            print(report, flush=True)
            if failed == given.faults:
                break
    seconds = time.monotonic() - began
    print(f"{ran} jobs in {seconds:.0f} s ({ran / max(seconds, 1e-9):.1f} a second), {failed} wrong")
    return int(bool(failed))


def run_all(seeds: Sequence[int], given: argparse.Namespace, until: float) -> Iterator[str | None]:
    """Run the jobs of these seeds, until a moment; what `run_one` says of each, as one ends after the other."""
    options = {"trace": given.trace, "twice": given.twice}
    one = partial(run_one, kinds=given.kinds, ranks=given.ranks, nodes=given.nodes, until=until, **options)
    if min(given.processes, len(seeds)) <= 1:
        pin(0)
        yield from map(one, seeds)
        return
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(given.processes, context, pin_next, [context.Value("i", 0)])
    try:
        yield from pool.map(one, seeds, chunksize=4)
    except BrokenProcessPool as error:
        yield f"a process of the simulation was killed: {error} (--processes 1 shows by which seed)"
    finally:
        pool.shutdown(cancel_futures=True)


def pin_next(numbers: Any) -> None:
    """Run this process on a core of its own, as far as there are any."""
    with numbers.get_lock():
        pin(numbers.value)
        numbers.value += 1


def pin(number: int) -> None:
    """Run this process on one core: its threads take turns, and wake each other in half the time there."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[number % len(cores)]})


def run_one(
    seed: int, kinds: Sequence[str], ranks: range, nodes: range, until: float, *, trace: bool, twice: bool
) -> str | None:
    """Run a job; a report of what is wrong, empty if nothing is. None: it is too late for one."""
    if time.monotonic() > until:
        return None
    job = Draw.of(seed, kinds, ranks, nodes)
    end = job.run(trace=trace or twice)
    if trace:
        print("\n".join(end.story))
    wrong = what_is_wrong(end, job)
    if twice and not wrong:
        wrong = what_differs(end.story, job.run(trace=True).story)
    return f"seed {seed}: {job}\n{job.program}\n{wrong}\n" if wrong else ""


def what_differs(first: Sequence[str], second: Sequence[str]) -> str | None:
    """Where two stories part; None if they are the same."""
    pairs = zip_longest(first, second, fillvalue="the end")
    return next((f"it differs from time to time: {one} | {other}" for one, other in pairs if one != other), None)


def find_planted(arguments: Sequence[str]) -> int:
    """Plant one fault after the other; return how many are not found, or by a job that is wrong without it, too."""
    missed = 0
    options = [each for each in arguments if each != "--planted"]
    for fault in PLANTS:
        with planted(fault) as folder:
            paths = os.pathsep.join([str(folder), *(each for each in sys.path if each)])
            kinds = ["--kinds", ",".join(fault.kinds)] if fault.kinds else []
            command = [sys.executable, "-m", "support.simulation.run", *kinds, *options, "--faults", "1"]
            environment = {**os.environ, "PYTHONPATH": paths}
            # In that folder: `-m` looks for modules in the working directory first.
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
            seed = re.search(r"^seed (\d+):", done.stdout, re.MULTILINE)
        last = done.stdout.strip().rpartition("\n")[2] or done.stderr
        verdict = "found" if done.returncode else "NOT FOUND"
        if done.returncode and (
            seed is None or subprocess.run([*command, "--seed", seed[1]], capture_output=True).returncode
        ):
            verdict = "NO PROOF, wrong without it"
        missed += verdict != "found"
        print(f"{verdict}: {fault.name}: {last}", flush=True)
        if done.returncode:
            print("\n".join(done.stdout.splitlines()[:4])[:600], flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
