"""Compare contestants in one run: interleaved in random order, the slowest rank counts.

The speed of a machine drifts while you measure (other load, frequency, placement of virtual cores). Therefore
contestants are never measured one after the other: every repetition runs all of them, and ratios are taken within it.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from hvlike.bench.harness.raw_mpi import RawMpi

SCRUB_BYTES = 24 << 20  # Private memory touched before each measurement: more than a core's share of the caches


def timed(call: Callable[[], object], count: int) -> list[float]:
    """Return the seconds of each of so many calls."""
    taken = []
    for _ in range(count):
        start = time.perf_counter()
        # Kept until the clock has stopped: giving the memory back is no part of the call.
        answer = call()
        taken.append(time.perf_counter() - start)
        del answer
    return taken


@dataclass(frozen=True)
class Contestant:
    """One way to do the work. `prepare` is not timed and makes the input anew; `run` is timed.

    `run` may return its seconds, a float, where it knows better; `verify` checks what it has done, raises HvlikeError.
    """

    name: str
    prepare: Callable[[], object]
    run: Callable[[], object]
    verify: Callable[[], object] = lambda: None

    def turn(self, raw: RawMpi) -> float:
        """Prepare, wait for all ranks, run. Collective. Returns the seconds that `run` took."""
        self.prepare()
        raw.barrier()
        start = time.perf_counter()
        answer = self.run()
        taken = time.perf_counter() - start
        return answer if isinstance(answer, float) else taken

    def warmed(self, times: int) -> Contestant:
        """Return the same contestant, which has done its work so many times just before its turn."""

        def prepare() -> None:
            for _ in range(times):
                self.prepare()
                self.run()
            self.prepare()

        return replace(self, prepare=prepare)


@dataclass(frozen=True)
class Summary:
    median: float
    first_quartile: float
    third_quartile: float

    @property
    def spread(self) -> float:
        return (self.third_quartile - self.first_quartile) / self.median

    def each(self, convert: Callable[[float], float]) -> Summary:
        """Return the same in another unit."""
        median, *quartiles = map(convert, (self.median, self.first_quartile, self.third_quartile))
        return Summary(median, min(quartiles), max(quartiles))

    @classmethod
    def of(cls, samples: Sequence[float]) -> Summary:
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0])
        first, median, third = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, first, third)


def with_samples(samples: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Any]]:
    """Return for JSON the median, the quartiles and the samples under each name."""
    return {name: {**asdict(Summary.of(each)), "samples": list(each)} for name, each in samples.items()}


def take_turns(
    order: random.Random, turns: Mapping[str, Callable[[], list[float]]], rounds: int
) -> dict[str, list[list[float]]]:
    """Give every contestant one turn in each round, in random order. Returns what each turn has measured."""
    measured: dict[str, list[list[float]]] = {name: [] for name in turns}
    for _ in range(rounds):
        for name in order.sample(list(turns), len(turns)):
            measured[name].append(turns[name]())
    return measured


def compare(
    raw: RawMpi, contestants: Sequence[Contestant], repetitions: int, *, warmups: int, seed: int, cold: bool = True
) -> dict[str, list[float]]:
    """Measure all contestants `repetitions` times, after `warmups` that do not count.

    cold: other memory is touched before each turn, so that nothing of the turn is in the caches.
    Collective: every rank calls it with the same contestants and the same seed (which draws the order).
    Returns for each contestant the seconds of every repetition, of its slowest rank.
    """
    order = random.Random(seed)
    private = np.ones(SCRUB_BYTES // 8)
    measured: dict[str, list[float]] = {each.name: [] for each in contestants}
    for repetition in range(warmups + repetitions):
        for contestant in order.sample(contestants, len(contestants)):
            if cold:
                np.add(private, 1.0, out=private)
            seconds = contestant.turn(raw)
            if repetition == 0:
                contestant.verify()
            if repetition >= warmups:
                measured[contestant.name].append(seconds)
    return {name: raw.maximum(samples) for name, samples in measured.items()}


@dataclass(frozen=True)
class Ratio:
    of_medians: float
    paired: Summary  # Of the ratios within one repetition

    @property
    def bar(self) -> Summary:
        """What a picture shows."""
        return Summary(self.of_medians, self.paired.first_quartile, self.paired.third_quartile)

    @classmethod
    def of(cls, samples: Mapping[str, Sequence[float]], name: str, to: str) -> Ratio:
        above, below = samples[name], samples[to]
        paired = Summary.of([a / b for a, b in zip(above, below, strict=True)])
        return cls(statistics.median(above) / statistics.median(below), paired)


def ratios_of(samples: Mapping[str, Sequence[float]], pairs: Mapping[str, tuple[str, str]]) -> dict[str, Ratio]:
    """Return the ratios of those pairs, (one, other) by name, of which both have taken part."""
    return {name: Ratio.of(samples, *pair) for name, pair in pairs.items() if samples.keys() >= set(pair)}
