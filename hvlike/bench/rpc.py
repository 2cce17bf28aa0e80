"""bench rpc: calls between two ranks by hvlike.rpc, beside torch.distributed.rpc over TensorPipe and plain MPI."""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import hvlike
from hvlike import rpc
from hvlike.bench.harness.benchmark import Benchmark, add_common, heading, left_out, runs_on_two_ranks
from hvlike.bench.harness.comparison import Ratio, Summary
from hvlike.bench.harness.raw_mpi import RawMessages
from hvlike.bench.harness.report import Bars, draw, format_seconds, parse_sizes, table
from hvlike.bench.rpc_session import Setting, TensorPipePair, let_rank_0_end, session, tensorpipe
from hvlike.bench.rpc_work import CALLEE, Idle, Rate, Trip, Work

EMPTY_BYTES = 64
"""What stands for an empty call."""


class Floor:
    """Plain MPI between ranks 0 and 1. Collective."""

    def __init__(self) -> None:
        self._raw = RawMessages()
        _open.append(self)

    def measure(self, work: Work) -> list[float]:
        """Seconds of each round trip. On rank 0; rank 1 takes part in a thread that serves a call."""
        if not isinstance(work, Trip):
            raise TypeError(f"plain MPI has no {work.title}")
        size, count = work.size or EMPTY_BYTES, work.warm_ups + work.trips
        other = rpc.rpc_async(CALLEE, _take_part, (size, count))
        taken = self.trips(size, count)
        other.wait()
        return taken[work.warm_ups :]

    def trips(self, size: int, count: int) -> list[float]:
        """Seconds of so many messages there and back. Both ranks."""
        return self._raw.round_trips(size, count)

    def close(self) -> None:
        """Free the communicator. Collective."""
        _open.remove(self)
        self._raw.free()


_open: list[Floor] = []
"""Where the calls that rank 1 serves find its floor."""


def _take_part(size: int, count: int) -> None:
    _open[-1].trips(size, count)


OURS, TENSORPIPE, MPI = "hvlike", "TensorPipe", "MPI"
NAMES = (OURS, TENSORPIPE, MPI)
"""In the order of the tables."""


@dataclass(frozen=True)
class Result:
    """What came out for one work: for each contestant and turn one value, or one for each rank.

    Seconds of a round trip or of a call; parts of a core where the pair was idle.
    """

    work: Work
    samples: dict[str, list[list[float]]]

    @property
    def names(self) -> list[str]:
        """Who took part."""
        return [name for name in NAMES if name in self.samples]

    def of(self, name: str, place: int = 0) -> Summary:
        """Median and quartiles over the turns of a contestant. place: the rank, for an idle pair."""
        return Summary.of([each[place] for each in self.samples[name]])

    @property
    def ratios(self) -> dict[str, Ratio]:
        """hvlike's time to that of each other; below 1: hvlike is faster."""
        if isinstance(self.work, Idle):
            return {}
        first = {name: [each[0] for each in turns] for name, turns in self.samples.items()}
        return {name: Ratio.of(first, OURS, name) for name in self.names if name != OURS}

    def as_json(self) -> dict[str, Any]:
        """The same for machines."""
        unit = "parts of a core" if isinstance(self.work, Idle) else "seconds"
        found = {
            name: [
                {**asdict(self.of(name, place)), "samples": list(values)}
                for place, values in enumerate(zip(*self.samples[name], strict=True))
            ]
            for name in self.names
        }
        ratios = {f"{OURS}/{name}": asdict(each) for name, each in self.ratios.items()}
        return {"work": self.work.title, **asdict(self.work), "unit": unit, "found": found, "ratios": ratios}


def as_text(conditions: dict[str, Any], results: Sequence[Result]) -> str:
    """A table for each kind of work, with head and foot."""
    trips, rates, idle = (_of(results, kind) for kind in (Trip, Rate, Idle))
    parts = [f"calls from rank 0 to rank 1, {heading(conditions)}"]
    for title, found, cell in (("round trip", trips, _seconds), ("calls a second", rates, _rate)):
        if found:
            names, others = found[0].names, list(found[0].ratios)
            rows = [
                [each.work.title, str(len(each.samples[OURS])), *(cell(each.of(name)) for name in names)]
                + [_ratio(each.ratios[name]) for name in others]
                for each in found
            ]
            parts.append(table([title, "n", *names, *(f"{OURS} / {name}" for name in others)], rows))
    for each in idle:
        rows = [[name, *(f"{each.of(name, rank).median:.2%}" for rank in (0, 1))] for name in each.names]
        parts.append(table([each.work.title, "rank 0", "rank 1"], rows))
    foot = (
        "Median over turns [interquartile range]; a turn's value is the median of the calls that are timed in it.\n"
        "Ratios: of the times, of medians [quartiles of the ratios within one round]; below 1 hvlike is faster.\n"
        "MPI: blocking sends of the same bytes there and back, 64 for an empty call. idle: parts of a core, median."
    )
    return "\n".join(["\n\n".join([*parts, foot]), *conditions["left_out"]])


def panels(results: Sequence[Result]) -> list[Bars]:
    """Round trips, calls a second, idle ranks, and the ratios of the times."""
    drawn = []
    for title, unit, kind in (("round trip", "seconds", Trip), ("empty calls", "calls a second", Rate)):
        found = _of(results, kind)
        if found:
            series = {name: [_height(each, name) for each in found] for name in found[0].names}
            drawn.append(Bars(title, unit, [each.work.title for each in found], series, logarithmic=True))
    timed = [each for each in results if each.ratios]
    others = sorted({name for each in timed for name in each.ratios}, key=NAMES.index)
    if others:
        nan = float("nan")
        ratios = {
            f"{OURS} / {name}": [each.ratios[name].of_medians if name in each.ratios else nan for each in timed]
            for name in others
        }
        drawn.append(Bars("time, lower is better", "ratio", [each.work.title for each in timed], ratios, line=1.0))
    for each in _of(results, Idle):
        series = {name: [100 * each.of(name, rank).median for rank in (0, 1)] for name in each.names}
        drawn.append(Bars(each.work.title, "% of a core", ["rank 0", "rank 1"], series))
    return drawn


def _of(results: Sequence[Result], kind: type[Work]) -> list[Result]:
    return [each for each in results if isinstance(each.work, kind)]


def _height(result: Result, name: str) -> float:
    median = result.of(name).median
    return 1.0 / median if isinstance(result.work, Rate) else median


def _seconds(summary: Summary) -> str:
    return f"{format_seconds(summary.median)} [{summary.spread:.0%}]"


def _rate(summary: Summary) -> str:
    return f"{1.0 / summary.median:,.0f} [{summary.spread:.0%}]"


def _ratio(ratio: Ratio) -> str:
    return f"{ratio.of_medians:.2f} [{ratio.paired.first_quartile:.2f}, {ratio.paired.third_quartile:.2f}]"


DEFAULT_SIZES = "1KiB,4MiB,256MiB"
IN_FLIGHT = (1, 64)
_ROUNDS = 9


@dataclass(frozen=True)
class Contestant:
    """One way to call; `measure` does some work once, on rank 0, and returns its samples."""

    name: str
    measure: Callable[[Work], list[float]]
    only: type | None = None
    """The kind of work that it takes part in; None: all."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument(
        "--sizes", type=parse_sizes, default=parse_sizes(DEFAULT_SIZES), help=f"bytes, default {DEFAULT_SIZES}"
    )
    parser.add_argument(
        "--idle", type=float, default=2.0, metavar="SECONDS", help="to watch an idle pair; default %(default)s"
    )
    parser.add_argument("--no-tensorpipe", action="store_true", help="leave torch.distributed.rpc out")
    add_common(parser, f"{_ROUNDS} turns of each, a third of them idle", horovod=False)


def run(options: argparse.Namespace) -> int:
    """Measure and print on rank 0. Collective; two ranks. Returns the exit status."""
    if not runs_on_two_ranks("rpc"):
        return 2
    with session("rpc") as setting:
        floor = Floor()
        if hvlike.rank() == 0:
            compare(options, setting, floor)
        let_rank_0_end()
        floor.close()
    return 0


def compare(options: argparse.Namespace, setting: Setting, floor: Floor) -> None:
    """Measure everything with all contestants and show it. On rank 0, while the main thread of rank 1 sleeps."""
    contestants = [Contestant(OURS, lambda work: work.measure(rpc)), Contestant(MPI, floor.measure, Trip)]
    reasons = []
    with tensorpipe(setting.cores, left_out(options.no_tensorpipe, "--no-tensorpipe")) as pair:
        if isinstance(pair, TensorPipePair):
            contestants.append(Contestant(TENSORPIPE, pair.measure))
        else:
            reasons.append(f"Without {TENSORPIPE}: {pair}.")
        results = measure(options, contestants)
    show(options, {**setting.conditions, "left_out": reasons}, results)


def measure(options: argparse.Namespace, contestants: Sequence[Contestant]) -> list[Result]:
    """Every work in rounds: in each round all contestants have a turn, in random order. A first round does not count.

    The sample of a turn is the median of what it has timed.
    """
    order = random.Random(options.seed)
    rounds = options.repetitions or _ROUNDS
    works: list[Work] = [Trip(0), *map(Trip, options.sizes), *map(Rate, IN_FLIGHT), Idle(options.idle)]
    results = []
    for work in works:
        playing = [each for each in contestants if each.only is None or isinstance(work, each.only)]
        samples: dict[str, list[list[float]]] = {each.name: [] for each in playing}
        idle = isinstance(work, Idle)
        for turn in range(-(-rounds // 3) if idle else rounds + 1):
            for each in order.sample(playing, len(playing)):
                found = each.measure(work)
                if idle:
                    samples[each.name].append(found)
                elif turn:
                    samples[each.name].append([statistics.median(found)])
        results.append(Result(work, samples))
    return results


def show(options: argparse.Namespace, conditions: dict[str, Any], results: list[Result]) -> None:
    """Print what was found, and draw it."""
    if options.json:
        print(json.dumps({**conditions, "results": [each.as_json() for each in results]}))
    else:
        print(as_text(conditions, results))
    if options.plot:
        draw(options.plot, "remote calls between two ranks", panels(results))


BENCHMARK = Benchmark("rpc", "calls by hvlike.rpc beside torch.distributed.rpc and plain MPI", add_arguments, run)
