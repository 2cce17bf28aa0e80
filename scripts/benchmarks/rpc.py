"""bench rpc: calls between two ranks by hvlike.rpc, beside torch.distributed.rpc over TensorPipe and plain MPI."""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from benchmarks.rpc_session import Idle, Rate, Session, Trip, Work, round_trips, run_session
from hvlike import rpc
from hvlike.bench.harness.benchmark import add_common, heading
from hvlike.bench.harness.comparison import Ratio, Summary, ratios_of, take_turns
from hvlike.bench.harness.raw_mpi import RawMpi
from hvlike.bench.harness.report import Bars, parse_sizes, publish, ratio_bars, ratio_cell, table, with_spread

PURPOSE = "calls by hvlike.rpc beside torch.distributed.rpc and plain MPI"

EMPTY_BYTES = 64  # Bytes of a message in place of an empty call
OURS, TENSORPIPE, MPI = "hvlike", "TensorPipe", "MPI"
NAMES = (OURS, TENSORPIPE, MPI)  # In the order of the tables
_PAIRS = {f"{OURS}/{other}": (OURS, other) for other in (TENSORPIPE, MPI)}
DEFAULT_SIZES = "1KiB,4MiB,256MiB"
IN_FLIGHT = (1, 64)
_ROUNDS = 9


@dataclass(frozen=True)
class Result:
    """For each contestant and turn one value, or one for each rank: seconds, or parts of a core where it was idle."""

    work: Work
    samples: dict[str, list[list[float]]]

    @property
    def names(self) -> list[str]:
        return [name for name in NAMES if name in self.samples]

    def of(self, name: str, rank: int = 0) -> Summary:
        """Median and quartiles over the turns of a contestant. rank: for an idle pair."""
        return Summary.of([each[rank] for each in self.samples[name]])

    @property
    def ratios(self) -> dict[str, Ratio]:
        first = {name: [each[0] for each in turns] for name, turns in self.samples.items()}
        return {} if isinstance(self.work, Idle) else ratios_of(first, _PAIRS)

    def as_json(self) -> dict[str, Any]:
        unit = "parts of a core" if isinstance(self.work, Idle) else "seconds"
        found = {
            name: [
                {**asdict(self.of(name, rank)), "samples": list(values)}
                for rank, values in enumerate(zip(*self.samples[name], strict=True))
            ]
            for name in self.names
        }
        ratios = {name: asdict(each) for name, each in self.ratios.items()}
        return {"work": self.work.title, **asdict(self.work), "unit": unit, "found": found, "ratios": ratios}


def as_text(conditions: dict[str, Any], results: Sequence[Result]) -> str:
    trips, rates, idle = (_of(results, kind) for kind in (Trip, Rate, Idle))
    parts = [f"calls from rank 0 to rank 1, {heading(conditions)}"]
    for title, found, cell in (("round trip", trips, with_spread), ("calls a second", rates, _rate)):
        if found:
            names, pairs = found[0].names, list(found[0].ratios)
            rows = [
                [each.work.title, str(len(each.samples[OURS])), *(cell(each.of(name)) for name in names)]
                + [ratio_cell(each.ratios[pair]) for pair in pairs]
                for each in found
            ]
            parts.append(table([title, "n", *names, *pairs], rows))
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
    drawn = []
    heights: dict[tuple[str, str], tuple[type[Work], Callable[[float], float]]] = {
        ("round trip", "seconds"): (Trip, lambda seconds: seconds),
        ("empty calls", "calls a second"): (Rate, lambda seconds: 1.0 / seconds),
    }
    for (title, unit), (kind, height) in heights.items():
        found = _of(results, kind)
        if found:
            series = {name: [each.of(name).each(height) for each in found] for name in found[0].names}
            drawn.append(Bars(title, unit, [each.work.title for each in found], series, logarithmic=True))
    timed = [each for each in results if each.ratios]
    pairs = [pair for pair in _PAIRS if any(pair in each.ratios for each in timed)]
    if pairs:
        titles = [each.work.title for each in timed]
        drawn.append(Bars("time, lower is better", "ratio", titles, ratio_bars(timed, pairs), line=1.0))
    for each in _of(results, Idle):
        series = {name: [each.of(name, rank).each(lambda part: 100 * part) for rank in (0, 1)] for name in each.names}
        drawn.append(Bars(each.work.title, "% of a core", ["rank 0", "rank 1"], series))
    return drawn


def _of(results: Sequence[Result], kind: type[Work]) -> list[Result]:
    return [each for each in results if isinstance(each.work, kind)]


def _rate(summary: Summary) -> str:
    return with_spread(summary, lambda seconds: f"{1.0 / seconds:,.0f}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", type=parse_sizes, default=DEFAULT_SIZES, help="bytes, default %(default)s")
    idle = "to watch an idle pair; default %(default)s"
    parser.add_argument("--idle", type=float, default=2.0, metavar="SECONDS", help=idle)
    add_common(parser, f"{_ROUNDS} turns of each, a third of them idle", TENSORPIPE)


def run(options: argparse.Namespace) -> int:
    return run_session("rpc", options.no_tensorpipe, partial(compare, options))


def compare(options: argparse.Namespace, session: Session) -> None:
    """Measure everything with all contestants and show it. On rank 0."""
    left_out = [f"Without {TENSORPIPE}: {session.pair}."] if isinstance(session.pair, str) else []
    results = measure(options, session)
    conditions = {**session.conditions, "left_out": left_out}
    document = {**conditions, "results": [each.as_json() for each in results]}
    publish(options, document, as_text(conditions, results), "remote calls between two ranks", panels(results))


def measure(options: argparse.Namespace, session: Session) -> list[Result]:
    """Measure every work in rounds; the first does not count, a turn's sample is the median of what it has timed."""
    order = random.Random(options.seed)
    rounds = options.repetitions or _ROUNDS
    works: list[Trip | Rate | Idle] = [Trip(0), *map(Trip, options.sizes), *map(Rate, IN_FLIGHT), Idle(options.idle)]
    results = []
    for work in works:
        turns: dict[str, Callable[[], list[float]]] = {OURS: partial(work.measure, rpc)}
        if isinstance(work, Trip):
            turns[MPI] = partial(measure_mpi, session.raw, work)
        if not isinstance(session.pair, str):
            turns[TENSORPIPE] = partial(session.pair.measure, work)
        if isinstance(work, Idle):
            results.append(Result(work, take_turns(order, turns, -(-rounds // 3))))
        else:
            measured = take_turns(order, turns, rounds + 1).items()
            medians = {name: [[statistics.median(turn)] for turn in each[1:]] for name, each in measured}
            results.append(Result(work, medians))
    return results


def measure_mpi(raw: RawMpi, work: Trip) -> list[float]:
    """Seconds of each round trip by plain MPI, without those that do not count."""
    return round_trips(raw, work.size or EMPTY_BYTES, work.warm_ups + work.trips)[work.warm_ups :]
