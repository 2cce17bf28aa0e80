"""Autotuning: sizes of a reduction are tried while it trains, and the best stays; all ranks change after the same step.

The logarithms of the measured times are modelled by a Gaussian process with a squared-exponential kernel; the next
setting is the one with the largest expected improvement over the best of the model.
Source: Jones, Schonlau, Welch, "Efficient Global Optimization of Expensive Black-Box Functions", 1998; Rasmussen and
Williams, "Gaussian Processes for Machine Learning", 2006, algorithm 2.1.

After each sample the ranks exchange two tiny named reductions: the time of a step, of which the largest counts, and
the setting that follows, which the first rank of the set decides. The rest of the time nothing is sent.
The results of training stay the same to the last bit: the sizes only say what travels together.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray

from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.collectives.api.allreduce import allreduce
from hvlike.collectives.controller.controller import Controller
from hvlike.collectives.requests.plan import BucketSizes
from hvlike.collectives.requests.process_set import ProcessSet
from hvlike.collectives.session.context import current
from hvlike.config import Config
from hvlike.observe import printing
from hvlike.training.gradients.planned_reducer import PlannedReducer
from hvlike.training.gradients.reduction import DISTRIBUTED_OPTIMIZER

_log = logging.getLogger("hvlike")

BUCKET_BYTES = tuple(mebibytes << 20 for mebibytes in (1, 2, 4, 8, 16, 32, 64, 128))
FIRST_SHARES = (1, 4, 16)  # How many times smaller the first bucket may be, so that communication starts earlier

CYCLE_MICROSECONDS = (0, 500, 1000, 2500, 5000)  # How long the coordinator may gather requests before it answers


class Choice(NamedTuple):
    """One setting: whole numbers, so that it travels between ranks without rounding."""

    bucket_bytes: int
    first_bucket_bytes: int
    cycle_microseconds: int


def make_candidates(start: Choice, total_bytes: int, *, overlaps: bool) -> list[Choice]:
    """All choices that differ in effect for gradients of `total_bytes`, `start` first; `overlaps`: with backward."""
    limits = sorted({*BUCKET_BYTES, start.bucket_bytes})
    # All limits that hold everything have the same effect.
    enough = next((limit for limit in limits if limit >= total_bytes), limits[-1])
    sizes = [limit for limit in limits if limit <= enough]
    shares = FIRST_SHARES if overlaps else FIRST_SHARES[:1]
    cycles = sorted({*CYCLE_MICROSECONDS, start.cycle_microseconds})
    table = [Choice(size, size // share, cycle) for size in sizes for share in shares for cycle in cycles]
    return [start, *(each for each in table if each != start)]


def coordinates(choices: Sequence[Choice]) -> list[tuple[float, float, float]]:
    log = math.log2
    return [(log(size), log(size / first), log(1.0 + cycle / 500)) for size, first, cycle in choices]


Array = NDArray[np.float64]

LENGTH_SCALES = (1.6, 0.8, 0.4, 0.2)  # Distances in the unit cube over which times are correlated; the likeliest counts
_LEAST_NOISE = 1e-6


class Measurement(NamedTuple):
    """A sample: which point of the table was in use, and the time of a step with it."""

    point: int
    seconds: float


class Belief(NamedTuple):
    """The process's mean and deviation at every point, in units of the measured deviation."""

    mean: Array
    deviation: Array


def unit_cube(points: Sequence[Sequence[float]]) -> Array:
    """The points with every coordinate stretched to 0..1; a coordinate that never changes becomes 0."""
    table = np.asarray(points, dtype=np.float64)
    low = table.min(axis=0)
    width = table.max(axis=0) - low
    return np.asarray((table - low) / np.where(width > 0, width, 1.0))


def suggest(points: Array, measured: Sequence[Measurement], noise: float) -> int:
    """The index of the point, in the unit cube, to measure next. Ties go to the lower index: the same on all ranks."""
    if not measured:
        return 0
    belief = believe(points, measured, noise)
    best = min(belief.mean[each.point] for each in measured)
    return int(np.argmax(expected_improvement(belief, float(best))))


def best_measured(points: Array, measured: Sequence[Measurement], noise: float) -> int:
    """The index of the measured point that the process believes to be the fastest: one lucky sample does not win."""
    belief = believe(points, measured, noise)
    return min((each.point for each in measured), key=lambda index: (float(belief.mean[index]), index))


def believe(points: Array, measured: Sequence[Measurement], noise: float) -> Belief:
    values = np.log([each.seconds for each in measured])
    spread = float(values.std())
    values = (values - values.mean()) / (spread or 1.0)
    places = points[[each.point for each in measured]]
    fits = []
    for scale in LENGTH_SCALES:
        covariance = _kernel(places, places, scale) + max(noise, _LEAST_NOISE) * np.eye(len(places))
        lower = np.linalg.cholesky(covariance)
        weights = np.linalg.solve(lower.T, np.linalg.solve(lower, values))
        likelihood = -0.5 * float(values @ weights) - float(np.log(np.diag(lower)).sum())
        fits.append((likelihood, scale, lower, weights))
    _, scale, lower, weights = max(fits, key=itemgetter(0))
    across = _kernel(points, places, scale)
    explained = np.linalg.solve(lower, across.T)
    variance = np.maximum(1.0 - (explained**2).sum(axis=0), 0.0)
    return Belief(np.asarray(across @ weights), np.sqrt(variance))


def expected_improvement(belief: Belief, best: float) -> Array:
    gain = best - belief.mean
    deviation = np.maximum(belief.deviation, 1e-12)
    normal = NormalDist()
    below, density = np.array([(normal.cdf(each), normal.pdf(each)) for each in gain / deviation]).T
    return np.asarray(np.maximum(gain * below + deviation * density, 0.0))


def _kernel(first: Array, second: Array, scale: float) -> Array:
    distance = ((first[:, None, :] - second[None, :, :]) ** 2).sum(axis=2)
    return np.asarray(np.exp(-0.5 * distance / scale**2))


class TuningSearch:
    def __init__(self, table: Sequence[Choice], *, warmup: int, samples: int, noise: float) -> None:
        """`table` begins with the choice in use; the first `warmup` samples do not count."""
        self.choice = table[0]
        self.finished = False
        self._table = table
        self._points = unit_cube(coordinates(table))
        self._index = 0
        self._warmup = warmup
        self._samples = samples
        self._noise = noise
        self._measured: list[Measurement] = []

    @property
    def warming_up(self) -> bool:
        return self._warmup > 0

    def record(self, seconds: float) -> None:
        if self._warmup:
            self._warmup -= 1
            return
        self._measured.append(Measurement(self._index, seconds))
        self.finished = len(self._measured) >= self._samples
        choose = best_measured if self.finished else suggest
        self._index = choose(self._points, self._measured, self._noise)
        self.choice = self._table[self._index]

    def seconds_of(self, choice: Choice) -> float:
        return min(each.seconds for each in self._measured if self._table[each.point] == choice)


class StepSampler:
    """Collects the times between ends of consecutive steps under one plan.

    All ranks count the steps that a plan has served, so their samples end at the same step. With 3 steps a sample
    (x: counted; the step that agrees on a plan only starts the clock):

        steps served      1  2  3  4  5  6  7   1  2  3  4
        time of step         x  x  x  x  x  x      x  x  x
        sample complete            ^        ^            ^
    """

    def __init__(self, steps_per_sample: int) -> None:
        self._steps = steps_per_sample
        self._last: float | None = None
        self._times: list[float] = []

    def step_ended(self, served: int, now: float) -> float | None:
        """Note the end of a step; return the median time of a step if that completes a sample."""
        last, self._last = self._last, now
        if served <= 1 or last is None:
            self._times = []
            return None
        self._times.append(now - last)
        if len(self._times) < self._steps:
            return None
        sample = float(np.median(self._times))
        self._times = []
        return sample

    def resume(self, now: float) -> None:
        self._last = now


COLUMNS = ("sample", "warmup", "bucket_bytes", "first_bucket_bytes", "cycle_time_ms", "seconds_per_step")
"""Of the CSV file: sample from 1, whether it was thrown away, setting, median time of a step on the slowest rank."""


class TuningReport:
    """Writes the CSV file, the line with the best setting and the settings file; on the first rank of the set."""

    def __init__(self, log: str | None, file: str | None) -> None:
        """A file that cannot be written is said now, before any time is spent on tuning."""
        self._samples = 0
        self._log = log and _write("HVLIKE_AUTOTUNE_LOG", log, ",".join(COLUMNS) + "\n", "w")
        self._file = file and _write("HVLIKE_AUTOTUNE_FILE", file, "", "a")

    def sample(self, choice: Choice, seconds: float, *, warmup: bool) -> None:
        self._samples += 1
        if self._log is None:
            return
        values = (self._samples, int(warmup), choice.bucket_bytes, choice.first_bucket_bytes)
        times = (f"{choice.cycle_microseconds / 1000:g}", f"{seconds:.9f}")
        line = ",".join([*map(str, values), *times]) + "\n"
        self._log = _write("HVLIKE_AUTOTUNE_LOG", self._log, line, "a")

    def winner(self, choice: Choice, seconds: float, start_seconds: float) -> None:
        size, first, cycle = choice.bucket_bytes, choice.first_bucket_bytes, f"{choice.cycle_microseconds / 1000:g}"
        found = (
            f"bucket {size / (1 << 20):g} MiB, first bucket {first / (1 << 20):g} MiB, cycle time {cycle} ms: "
            f"{1000 * seconds:.3f} ms a step, {1000 * start_seconds:.3f} ms at the start"
        )
        where = "" if self._file is None else f"; load it with HVLIKE_KNOBS_FILE={self._file}"
        printing.write(f"hvlike autotune: {found}{where}")
        if self._file is not None:
            lines = f"HVLIKE_BUCKET_BYTES={size}\nHVLIKE_FIRST_BUCKET_BYTES={first}\nHVLIKE_CYCLE_TIME={cycle}\n"
            _write("HVLIKE_AUTOTUNE_FILE", self._file, f"# {found}\n{lines}", "w")


def _write(knob: str, path: str, text: str, mode: str) -> str | None:
    """Return the path to go on with, None where it cannot be written: that ends the report, not the training."""
    try:
        with Path(path).open(mode) as file:
            file.write(text)
    except OSError as error:
        _log.warning("%s=%s: the file cannot be written: %s. Nothing more is written there.", knob, path, error)
        return None
    return path


class Tuner:
    """One search, from the first sample to the setting that stays."""

    def __init__(self, reducer: PlannedReducer, name: str, process_set: ProcessSet | None, config: Config) -> None:
        self.finished = False  # The setting stays; nothing more is measured
        self.choice = Choice(*reducer.sizes, round(1000 * config.cycle_time))
        self._name = name
        self._process_set = process_set
        set_state = current().find_set(process_set, "Autotune")
        self._controller = set_state.controller
        self._size = set_state.group.size
        self._sampler = StepSampler(config.autotune_steps_per_sample)
        self._search: TuningSearch | None = None
        if set_state.group.rank == 0:
            self._search = TuningSearch(
                make_candidates(self.choice, reducer.total_bytes, overlaps=reducer.overlaps),
                warmup=config.autotune_warmup_samples,
                samples=config.autotune_max_samples,
                noise=config.autotune_noise,
            )
            self._report = TuningReport(config.autotune_log, config.autotune_file)
            self._start = self.choice

    def attach(self, reducer: PlannedReducer) -> None:
        """Let a reducer that has no plan yet use the current setting. Local."""
        reducer.resize(BucketSizes(self.choice.bucket_bytes, self.choice.first_bucket_bytes))

    def step_ended(self, reducer: PlannedReducer) -> None:
        """Note the end of a reduction; at the end of a sample, go on to the next setting: collective, and blocks."""
        schedule = reducer.schedule
        if self.finished or schedule is None or schedule.active < self._size:
            # Ranks that have joined do not count steps; when all have joined, plans and counts start anew.
            return
        seconds = self._sampler.step_ended(reducer.served, time.perf_counter())
        if seconds is None:
            return
        slowest = self._largest(torch.tensor([seconds], dtype=torch.float64, device="cpu"), "time")
        decision = torch.full((4,), -1, dtype=torch.int64, device="cpu")
        if self._search is not None:
            decision.copy_(torch.tensor(self._decide(self._search, float(slowest[0])), device="cpu"))
        *sizes, finished = self._largest(decision, "choice").tolist()
        self.finished = bool(finished)
        choice = Choice(*sizes)
        if choice != self.choice:
            self.choice = choice
            self.attach(reducer)
            self._controller.cycle_seconds = choice.cycle_microseconds / 1e6
        self._sampler.resume(time.perf_counter())

    def _decide(self, search: TuningSearch, seconds: float) -> tuple[int, ...]:
        self._report.sample(self.choice, seconds, warmup=search.warming_up)
        search.record(seconds)
        best = search.choice
        if search.finished:
            self._report.winner(best, search.seconds_of(best), search.seconds_of(self._start))
        return *best, int(search.finished)

    def _largest(self, values: torch.Tensor, what: str) -> torch.Tensor:
        name = f"{self._name}.autotune.{what}"
        return allreduce(values, op=ReduceOp.MAX, name=name, process_set=self._process_set)


_tuned: WeakSet[Controller] = WeakSet()  # Of process sets whose first optimizer is tuned


def tune(tuner: Tuner | None, reducer: PlannedReducer, name: str, process_set: ProcessSet | None) -> Tuner | None:
    """Return the tuner for a new reducer, for the first optimizer of a set alone: several would measure each other."""
    controller = current().find_set(process_set, "Autotune").controller
    if tuner is None and name.startswith(DISTRIBUTED_OPTIMIZER) and controller not in _tuned:
        _tuned.add(controller)
        return Tuner(reducer, name, process_set, current().knobs)
    if tuner is not None:
        tuner.attach(reducer)
    return tuner
