"""Autotuning: a handful of bucket sizes is tried in turn while it trains, and the fastest stays.

    start, 1, 4, 16, 64 MiB,  start, 1, 4, 16, 64 MiB,  the one whose two samples were shortest together

After each sample the ranks exchange one number, the time of a step, of which the largest counts. So all ranks come to
the same size after the same step. The results of training stay the same to the last bit: the size only says what
travels together.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from weakref import WeakSet

import torch

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

BUCKET_BYTES = tuple(mebibytes << 20 for mebibytes in (1, 4, 16, 64))
WARMUP_SAMPLES = 3  # Discarded at the start
ROUNDS = 2  # How often each is tried: one disturbed sample loses nothing
COLUMNS = ("sample", "warmup", "bucket_bytes", "first_bucket_bytes", "seconds_per_step")
"""Of the CSV file: sample from 1, whether it was thrown away, sizes, median time of a step on the slowest rank."""


def make_candidates(start: BucketSizes) -> list[BucketSizes]:
    """Return the sizes to try, those in use first. A first bucket that is smaller stays so."""
    limit, first = start
    others = (BucketSizes(size, size if first == limit else min(first, size)) for size in BUCKET_BYTES)
    return [start, *(sizes for sizes in others if sizes != start)]


def fastest(seconds: Sequence[float], candidates: int) -> int:
    """Return the place of the candidate with the shortest samples; `seconds`: of all, round after round."""
    return min(range(candidates), key=lambda place: sum(seconds[place::candidates]))


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
        sample = median(self._times)
        self._times = []
        return sample

    def resume(self, now: float) -> None:
        """Go on after what does not count. Local."""
        self._last = now


class Tuner:
    """Tries sizes for one reducer and those that replace it, until the fastest are known."""

    def __init__(self, reducer: PlannedReducer, name: str, process_set: ProcessSet | None, config: Config) -> None:
        self.finished = False  # The sizes stay; nothing more is measured
        self.sizes = reducer.proposal.sizes
        self._name = f"{name}.autotune.time"
        self._process_set = process_set
        self._group = current().find_set(process_set, "Autotune").group
        self._sampler = StepSampler(config.autotune_steps_per_sample)
        self._warmup = WARMUP_SAMPLES
        self._candidates = make_candidates(self.sizes)
        self._seconds: list[float] = []
        self._samples = 0
        self._log = config.autotune_log if self._group.rank == 0 else None
        self._write(",".join(COLUMNS), "w")

    def attach(self, reducer: PlannedReducer) -> None:
        """Let a reducer that has no plan yet use the current sizes. Local."""
        reducer.resize(self.sizes)

    def step_ended(self, reducer: PlannedReducer) -> None:
        """Note the end of a reduction; at the end of a sample go on to the next sizes: collective, and blocks."""
        schedule = reducer.schedule
        if self.finished or schedule is None or schedule.active < self._group.size:
            # Ranks that have joined do not count steps; when all have joined, plans and counts start anew.
            return
        seconds = self._sampler.step_ended(reducer.served, time.perf_counter())
        if seconds is None:
            return
        sample = torch.tensor([seconds], dtype=torch.float64, device="cpu")
        slowest = allreduce(sample, op=ReduceOp.MAX, name=self._name, process_set=self._process_set)
        self._record(float(slowest))
        self.attach(reducer)
        self._sampler.resume(time.perf_counter())

    def _record(self, seconds: float) -> None:
        is_warmup = self._warmup > 0
        self._samples += 1
        limit, first = self.sizes
        self._write(f"{self._samples},{int(is_warmup)},{limit},{first},{seconds:.9f}", "a")
        if is_warmup:
            self._warmup -= 1
            return
        self._seconds.append(seconds)
        count = len(self._candidates)
        self.finished = len(self._seconds) == ROUNDS * count
        place = fastest(self._seconds, count) if self.finished else len(self._seconds) % count
        self.sizes = self._candidates[place]
        if self.finished and self._group.rank == 0:
            found, start = (1000 * min(self._seconds[index::count]) for index in (place, 0))
            limit, first = self.sizes
            printing.write(
                f"hvlike autotune: HVLIKE_BUCKET_BYTES={limit} HVLIKE_FIRST_BUCKET_BYTES={first}: "
                f"{found:.3f} ms a step, {start:.3f} ms at the start"
            )

    def _write(self, line: str, mode: str) -> None:
        """Write a line of the CSV file. One that cannot be written ends the report, not the training."""
        if self._log is None:
            return
        try:
            with Path(self._log).open(mode) as file:
                file.write(f"{line}\n")
        except OSError as error:
            _log.warning(
                "HVLIKE_AUTOTUNE_LOG=%s: the file cannot be written: %s. Nothing more is written there.",
                self._log,
                error,
            )
            self._log = None


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
