"""bench recovery: from the moment a rank is killed to the first step after it, by phases.

Every measurement is a job of its own, under `mpirun --with-ft ulfm`, in which this process kills one rank, drawn by
chance, with SIGKILL. A phase ends when the last process that goes on is through with it:

    kill --- noticed --- rebuilt --- restored --- first step
             the training function gets the error
                         hvlike runs again, on whom is left, and has gone back to the last commit (reset callbacks)
                                     the state is the same on all (the training function is called again)

The processes of the job run this file too. They tell pairs of a word and a moment of the monotonic clock, which
all processes of a machine have in common.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Client, Connection, wait
from typing import Any

import torch
from torch import nn

import hvlike
from benchmarks.jobs import outside_of_jobs, refuse_inside_a_job
from hvlike.bench.harness.benchmark import add_common, positive
from hvlike.bench.harness.comparison import Summary
from hvlike.bench.harness.processes import Helpers, module_command
from hvlike.bench.harness.report import Bars, parse_sizes, publish, table
from hvlike.errors import HorovodInternalError, UsageError
from hvlike.observe.printing import format_seconds, format_size
from hvlike.transport.host.find_mpirun import Mpirun, ask_mpi_library, family_of_library, find_mpirun
from hvlike.transport.host.launcher_table import OPEN_MPI
from hvlike.version import page

PURPOSE = "from the kill of a rank to the first step after it"

STEP, COMMIT, NOTICED, REBUILT, RESUMED = "step", "commit", "noticed", "rebuilt", "resumed"
COMMIT_EVERY = 5  # Steps
_TOLERANT_FLAGS = ("--with-ft", "ulfm")  # With them a job can go on when a rank is lost
_WIDTH = 256
_FLOAT_BYTES = 4
SHRINK, SPARES = "shrink", "spare"
PHASES = ("noticed", "rebuilt", "restored", "first step")
_ENDS = {NOTICED: "noticed", REBUILT: "rebuilt", RESUMED: "restored", STEP: "first step"}
_STEPS_BEFORE = 12  # Of every rank: then there are commits
_MOST_DELAY = 0.05
_REPETITIONS = 3


class Model(nn.Module):
    """A small layer that learns, beside state of any size that does not."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(_WIDTH, _WIDTH)
        self.ballast = nn.Parameter(torch.ones(nbytes // _FLOAT_BYTES), requires_grad=False)


@hvlike.elastic.run
def train(state: Any, told: Callable[[str], None], asked_to_end: Callable[[], bool]) -> None:
    """Train until one rank is asked to end."""
    told(RESUMED)
    try:
        while not state.ended:
            state.optimizer.zero_grad()
            state.model.layer(torch.ones(8, _WIDTH)).square().mean().backward()
            state.optimizer.step()
            state.step += 1
            state.ended = bool(hvlike.allreduce(torch.tensor(int(asked_to_end())), name="end", op=hvlike.Max))
            told(STEP)
            if state.step % COMMIT_EVERY == 0:
                state.commit()
                told(COMMIT)
    except HorovodInternalError:
        told(NOTICED)
        raise


def serve(connected: Connection, nbytes: int) -> None:
    def tell(what: str) -> None:
        connected.send((what, time.monotonic()))

    hvlike.init()
    model = Model(nbytes)
    optimizer = hvlike.DistributedOptimizer(torch.optim.SGD(model.layer.parameters(), lr=0.01, momentum=0.9))
    state = hvlike.elastic.TorchState(model=model, optimizer=optimizer, step=0, ended=False)
    state.register_reset_callbacks([lambda: tell(REBUILT)])
    train(state, tell, connected.poll)
    hvlike.shutdown()


@dataclass(frozen=True)
class Recovery:
    """The seconds of each phase, and of the commits before."""

    phases: dict[str, float]
    commits: list[float]

    @property
    def total(self) -> float:
        return sum(self.phases.values())


Told = list[tuple[str, float]]
"""What a process has told, in its order: words and moments."""


class Watched:
    """A process of the job, as this one sees it."""

    def __init__(self, connected: Connection, process: int) -> None:
        self.connected = connected
        self.process = process
        self.told: Told = []


def _first(told: Told, what: str, moment: float) -> float | None:
    return next((when for each, when in told if each == what and when >= moment), None)


def _first_step(told: Told, moment: float) -> float | None:
    """When a process that was called again after this moment had made a step."""
    resumed = _first(told, RESUMED, moment)
    return None if resumed is None else _first(told, STEP, resumed)


def measure(mpirun: Mpirun, way: str, ranks: int, nbytes: int, draw: random.Random, seconds: float) -> Recovery:
    """Start a job, kill a rank, and see how the others go on. Raises: LaunchError where they do not."""
    spares = int(way == SPARES)
    helpers = Helpers("the job of bench recovery")
    command = partial(_command, mpirun, ranks + spares, nbytes)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HVLIKE_SPARES": str(spares), "HVLIKE_LOG_LEVEL": "error"}
    try:
        connections = helpers.start_job(command, ranks + spares, env=environment)
        watched = [Watched(each, helpers.ask(each)) for each in connections]
        _listen(helpers, watched, seconds, lambda: len(_trained(watched)) == ranks)
        victim = draw.choice(_trained(watched))
        time.sleep(_MOST_DELAY * draw.random())
        moment = time.monotonic()
        os.kill(victim.process, signal.SIGKILL)
        others = [each for each in watched if each is not victim]
        left = ranks - 1 + spares
        _listen(helpers, others, seconds, lambda: _went_on(others, moment) == left)
        recovery = read([each.told for each in others], moment)
        for each in others:
            each.connected.send("end")
        _listen(helpers, others, seconds, lambda: not others)
        return recovery
    finally:
        helpers.close()


def _command(mpirun: Mpirun, processes: int, nbytes: int, address: str) -> list[str]:
    first, *rest = module_command(mpirun, processes, "benchmarks.recovery", [address, str(nbytes)])
    return [first, *_TOLERANT_FLAGS, *rest]


def _trained(watched: Sequence[Watched]) -> list[Watched]:
    return [each for each in watched if sum(what == STEP for what, _ in each.told) >= _STEPS_BEFORE]


def _went_on(watched: Sequence[Watched], moment: float) -> int:
    return sum(_first_step(each.told, moment) is not None for each in watched)


def _listen(helpers: Helpers, watched: list[Watched], seconds: float, done: Callable[[], bool]) -> None:
    """Take what these tell until `done()`; those that hang up are left out. Raises: LaunchError."""
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end or not watched:
            raise helpers.failure(f"the ranks did not go on within {seconds:.0f} s")
        for connected in wait([each.connected for each in watched], 0.2):
            each = next(one for one in watched if one.connected is connected)
            try:
                each.told.append(each.connected.recv())
            except (EOFError, ConnectionError):
                watched.remove(each)


def read(told: Sequence[Told], moment: float) -> Recovery:
    """The phases after a kill at this moment, from what the others have told. A process may skip some, as spares do."""
    phases, before = {}, moment
    for what, name in _ENDS.items():
        ends = [_first_step(each, moment) if what == STEP else _first(each, what, moment) for each in told]
        ended = max([before, *(each for each in ends if each is not None)])
        phases[name], before = ended - before, ended
    commits = [
        when - earlier
        for each in told
        for (_, earlier), (what, when) in pairwise(each)
        if what == COMMIT and when < moment
    ]
    return Recovery(phases, commits)


@dataclass(frozen=True)
class Result:
    way: str
    nbytes: int
    recoveries: list[Recovery]

    @property
    def totals(self) -> list[float]:
        return [each.total for each in self.recoveries]

    @property
    def phases(self) -> dict[str, Summary]:
        return {name: Summary.of([each.phases[name] for each in self.recoveries]) for name in PHASES}

    @property
    def commit(self) -> Summary:
        return Summary.of([seconds for each in self.recoveries for seconds in each.commits])

    def as_json(self) -> dict[str, Any]:
        return {
            "way": self.way,
            "bytes": self.nbytes,
            "phases": {name: asdict(each) for name, each in self.phases.items()},
            "total": {**asdict(Summary.of(self.totals)), "worst": max(self.totals), "samples": self.totals},
            "commit": asdict(self.commit),
        }


def as_text(conditions: dict[str, Any], results: Sequence[Result]) -> str:
    header = ["what goes on", "state", *PHASES, "in all", "worst", "a commit"]
    rows = []
    for each in results:
        times = [each.phases[name].median for name in PHASES]
        times += [Summary.of(each.totals).median, max(each.totals), each.commit.median]
        rows.append([each.way, format_size(each.nbytes), *map(format_seconds, times)])
    return (
        f"a rank of {conditions['ranks']} is killed; {conditions['cores']} cores, {conditions['mpi']}\n"
        f"hvlike {conditions['hvlike']}, torch {conditions['torch']}, Python {conditions['python']}\n\n"
        f"{table(header, rows)}\n\n"
        f"medians of {conditions['repetitions']} jobs; a phase ends with the last process that goes on.\n"
        f"{SHRINK}: with a rank less. {SPARES}: a process that waited takes the place of the lost one."
    )


def panels(results: Sequence[Result]) -> list[Bars]:
    drawn = []
    for way in dict.fromkeys(each.way for each in results):
        of_way = [each for each in results if each.way == way]
        series = {name: [1e3 * each.phases[name].median for each in of_way] for name in PHASES}
        drawn.append(Bars(way, "ms", [format_size(each.nbytes) for each in of_way], series))
    return drawn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=_several, default=3, help="ranks that train, at least 2; default %(default)s")
    sizes = "of the state beside the model that learns; default 1MiB,64MiB,512MiB"
    parser.add_argument("--sizes", type=parse_sizes, default=parse_sizes("1MiB,64MiB,512MiB"), help=sizes)
    parser.add_argument("--timeout", type=positive, default=60, help="seconds for each part of a job, default 60")
    add_common(parser, f"{_REPETITIONS} jobs for each size and way")


def _several(text: str) -> int:
    ranks = positive(text)
    if ranks < 2:
        raise argparse.ArgumentTypeError("of one rank nobody is left to go on")
    return ranks


@outside_of_jobs
def run(options: argparse.Namespace) -> None:
    refuse_inside_a_job(os.environ, "recovery")
    library = ask_mpi_library(os.environ)
    mpirun = find_mpirun(library, os.environ)
    if family_of_library(library.vendor) != OPEN_MPI or int(library.version.partition(".")[0]) < 5:
        raise UsageError(
            f"bench recovery needs Open MPI 5, which can go on without a lost rank; mpi4py loads {library.text}. See "
            f"{page('elastic')} for what other libraries can do."
        )
    draw, repetitions = random.Random(options.seed), options.repetitions or _REPETITIONS
    results = []
    for nbytes in options.sizes:
        for way in (SHRINK, SPARES):
            found = [measure(mpirun, way, options.ranks, nbytes, draw, options.timeout) for _ in range(repetitions)]
            results.append(Result(way, nbytes, found))
    conditions = {
        "benchmark": "recovery",
        "ranks": options.ranks,
        "repetitions": repetitions,
        "cores": len(os.sched_getaffinity(0)),
        "hvlike": hvlike.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "mpi": library.text,
    }
    document = {**conditions, "results": [each.as_json() for each in results]}
    title = f"recovery of a job of {options.ranks} ranks from the loss of one"
    publish(options, document, as_text(conditions, results), title, panels(results))


if __name__ == "__main__":
    place, size = sys.argv[1:]
    with Client(place, family="AF_UNIX") as parent:
        parent.send(os.getpid())
        serve(parent, int(size))
