"""bench rpc: calls between two ranks by hvlike.rpc, beside torch.distributed.rpc over TensorPipe and plain MPI."""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import hvlike
from hvlike import rpc
from hvlike.bench.harness.benchmark import Benchmark, add_common, heading, left_out, runs_on_two_ranks
from hvlike.bench.harness.comparison import Ratio, Summary, take_turns
from hvlike.bench.harness.raw_mpi import RawMpi
from hvlike.bench.harness.report import Bars, parse_sizes, publish, ratio_cell, table, with_spread
from hvlike.bench.rpc_session import Setting, TensorPipePair, session, tensorpipe, wait_for_rank_0
from hvlike.bench.rpc_work import CALLEE, Idle, Rate, Trip, Work

EMPTY_BYTES = 64
"""Bytes of a message in place of an empty call."""


def measure_mpi(raw: RawMpi, work: Trip) -> list[float]:
    """Seconds of each round trip by plain MPI. On rank 0; rank 1 takes part in a thread that serves a call."""
    size, count = work.size or EMPTY_BYTES, work.warm_ups + work.trips
    other = rpc.rpc_async(CALLEE, _take_part, (size, count))
    taken = raw.round_trips(size, count)
    other.wait()
    return taken[work.warm_ups :]


_raw: list[RawMpi] = []
"""Where the calls that rank 1 serves find plain MPI."""


def _take_part(size: int, count: int) -> None:
    _raw[-1].round_trips(size, count)


OURS, TENSORPIPE, MPI = "hvlike", "TensorPipe", "MPI"
NAMES = (OURS, TENSORPIPE, MPI)
"""In the order of the tables."""


@dataclass(frozen=True)
class Result:
    """The result for one work: for each contestant and turn one value, or one for each rank.

    Seconds of a round trip or of a call; parts of a core where the pair was idle.
    """

    work: Work
    samples: dict[str, list[list[float]]]

    @property
    def names(self) -> list[str]:
        """The contestants that took part."""
        return [name for name in NAMES if name in self.samples]

    def of(self, name: str, rank: int = 0) -> Summary:
        """Median and quartiles over the turns of a contestant. rank: for an idle pair."""
        return Summary.of([each[rank] for each in self.samples[name]])

    @property
    def ratios(self) -> dict[str, Ratio]:
        """hvlike's time to that of each other; below 1: hvlike is faster."""
        if isinstance(self.work, Idle):
            return {}
        first = {name: [each[0] for each in turns] for name, turns in self.samples.items()}
        return {name: Ratio.of(first, OURS, name) for name in self.names if name != OURS}

    def as_json(self) -> dict[str, Any]:
        """Return the result for JSON."""
        unit = "parts of a core" if isinstance(self.work, Idle) else "seconds"
        found = {
            name: [
                {**asdict(self.of(name, rank)), "samples": list(values)}
                for rank, values in enumerate(zip(*self.samples[name], strict=True))
            ]
            for name in self.names
        }
        ratios = {f"{OURS}/{name}": asdict(each) for name, each in self.ratios.items()}
        return {"work": self.work.title, **asdict(self.work), "unit": unit, "found": found, "ratios": ratios}


def as_text(conditions: dict[str, Any], results: Sequence[Result]) -> str:
    """Return a table for each kind of work, with head and foot."""
    trips, rates, idle = (_of(results, kind) for kind in (Trip, Rate, Idle))
    parts = [f"calls from rank 0 to rank 1, {heading(conditions)}"]
    for title, found, cell in (("round trip", trips, with_spread), ("calls a second", rates, _rate)):
        if found:
            names, others = found[0].names, list(found[0].ratios)
            rows = [
                [each.work.title, str(len(each.samples[OURS])), *(cell(each.of(name)) for name in names)]
                + [ratio_cell(each.ratios[name]) for name in others]
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


def _rate(summary: Summary) -> str:
    return with_spread(summary, lambda seconds: f"{1.0 / seconds:,.0f}")


DEFAULT_SIZES = "1KiB,4MiB,256MiB"
IN_FLIGHT = (1, 64)
_ROUNDS = 9


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
        raw = RawMpi()
        _raw.append(raw)
        if hvlike.rank() == 0:
            compare(options, setting, raw)
        wait_for_rank_0()
        _raw.remove(raw)
        raw.free()
    return 0


def compare(options: argparse.Namespace, setting: Setting, raw: RawMpi) -> None:
    """Measure everything with all contestants and show it. On rank 0, while the main thread of rank 1 sleeps."""
    reasons = []
    with tensorpipe(setting.cores, left_out(options.no_tensorpipe, "--no-tensorpipe")) as pair:
        if isinstance(pair, str):
            reasons.append(f"Without {TENSORPIPE}: {pair}.")
        results = measure(options, raw, None if isinstance(pair, str) else pair)
    conditions = {**setting.conditions, "left_out": reasons}
    document = {**conditions, "results": [each.as_json() for each in results]}
    publish(options, document, as_text(conditions, results), "remote calls between two ranks", panels(results))


def measure(options: argparse.Namespace, raw: RawMpi, pair: TensorPipePair | None) -> list[Result]:
    """Measure every work in rounds, the first of which does not count.

    The sample of a turn is the median of what it has timed.
    """
    order = random.Random(options.seed)
    rounds = options.repetitions or _ROUNDS
    works: list[Trip | Rate | Idle] = [Trip(0), *map(Trip, options.sizes), *map(Rate, IN_FLIGHT), Idle(options.idle)]
    results = []
    for work in works:
        turns: dict[str, Callable[[], list[float]]] = {OURS: partial(work.measure, rpc)}
        if isinstance(work, Trip):
            turns[MPI] = partial(measure_mpi, raw, work)
        if pair is not None:
            turns[TENSORPIPE] = partial(pair.measure, work)
        if isinstance(work, Idle):
            results.append(Result(work, take_turns(order, turns, -(-rounds // 3))))
        else:
            measured = take_turns(order, turns, rounds + 1).items()
            medians = {name: [[statistics.median(turn)] for turn in each[1:]] for name, each in measured}
            results.append(Result(work, medians))
    return results


BENCHMARK = Benchmark("rpc", "calls by hvlike.rpc beside torch.distributed.rpc and plain MPI", add_arguments, run)
