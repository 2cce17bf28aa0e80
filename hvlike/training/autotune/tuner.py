"""Tunes the reduction of one optimizer while it trains; all ranks change to another setting after the same step.

After each sample the ranks exchange two tiny named reductions: the time of a step, of which the largest counts, and
the setting that follows, which the first rank of the set decides. The rest of the time nothing is sent.
The results of training stay the same to the last bit: the sizes only say what travels together.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.collectives.api.allreduce import allreduce
from hvlike.collectives.persistent.planned_reducer import PlannedReducer
from hvlike.collectives.requests.plan import BucketSizes
from hvlike.collectives.requests.process_set import ProcessSet
from hvlike.collectives.session.context import current
from hvlike.config import Config
from hvlike.errors import UsageError
from hvlike.training.autotune.search import Choice, TuningSearch, make_candidates


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
        """Note the end of a step at `now` seconds; return the median time of a step if that completes a sample."""
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
        """Start the clock again after something that is not part of a step."""
        self._last = now


COLUMNS = ("sample", "warmup", "bucket_bytes", "first_bucket_bytes", "cycle_time_ms", "seconds_per_step")
"""Of the CSV file: number of the sample from 1, whether it was thrown away (0 or 1), the setting, and the median time
of a step on the slowest rank."""


class TuningReport:
    """Writes the CSV file, the line with the best setting and the settings file; on the first rank of the set."""

    def __init__(self, log: str | None, file: str | None) -> None:
        """Take the paths of the CSV file and the settings file, None for none.

        Raises UsageError when one of them cannot be written, before any time is spent on tuning.
        """
        self._log = log
        self._file = file
        self._samples = 0
        if log is not None:
            _write("HVLIKE_AUTOTUNE_LOG", log, ",".join(COLUMNS) + "\n", "w")
        if file is not None:
            _write("HVLIKE_AUTOTUNE_FILE", file, "", "a")

    def sample(self, choice: Choice, seconds: float, *, warmup: bool) -> None:
        """Write one sample."""
        self._samples += 1
        if self._log is None:
            return
        values = (self._samples, int(warmup), choice.bucket_bytes, choice.first_bucket_bytes)
        times = (f"{choice.cycle_microseconds / 1000:g}", f"{seconds:.9f}")
        _write("HVLIKE_AUTOTUNE_LOG", self._log, ",".join([*map(str, values), *times]) + "\n", "a")

    def winner(self, choice: Choice, seconds: float, start_seconds: float) -> None:
        """Write the setting that stays."""
        found = f"{choice.describe()}: {1000 * seconds:.3f} ms a step, {1000 * start_seconds:.3f} ms at the start"
        where = "" if self._file is None else f"; load it with HVLIKE_KNOBS_FILE={self._file}"
        print(f"hvlike autotune: {found}{where}", file=sys.stderr, flush=True)
        if self._file is not None:
            lines = [f"# {found}", *knob_lines(choice)]
            _write("HVLIKE_AUTOTUNE_FILE", self._file, "".join(f"{line}\n" for line in lines), "w")


def knob_lines(choice: Choice) -> list[str]:
    """Return the setting as lines NAME=value."""
    return [
        f"HVLIKE_BUCKET_BYTES={choice.bucket_bytes}",
        f"HVLIKE_FIRST_BUCKET_BYTES={choice.first_bucket_bytes}",
        f"HVLIKE_CYCLE_TIME={choice.cycle_microseconds / 1000:g}",
    ]


def _write(knob: str, path: str, text: str, mode: str) -> None:
    try:
        with Path(path).open(mode) as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"{knob}={path}: the file cannot be written: {error}.") from None


FIRST_NAME = "DistributedOptimizer.noname.0"
"""The name of the first optimizer that reduces in a process set."""


class Tuner:
    """One search, from the first sample to the setting that stays."""

    def __init__(
        self,
        reducer: PlannedReducer,
        name: str,
        process_set: ProcessSet | None,
        config: Config,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Tune the sizes of `reducer`; messages have `name`, the same on every rank. Local.

        Raises UsageError where the log or the settings file cannot be written.
        """
        self.finished = False
        """The setting stays; nothing more is measured."""
        self.choice = Choice(*reducer.sizes, round(1000 * config.cycle_time))
        self._name = name
        self._process_set = process_set
        set_state = current().find_set(process_set, "Autotune")
        self._controller = set_state.controller
        self._size = set_state.group.size
        self._clock = clock
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
        """Note the end of a reduction on all ranks; at the end of a sample, go on to the next setting.

        Collective over the process set; blocks at the end of a sample only.
        Raises PeerLeftError or ShutdownError, as the reduction itself.
        """
        schedule = reducer.schedule
        if self.finished or schedule is None or schedule.active < self._size:
            # Ranks that have joined do not count steps; when all have joined, plans and counts start anew.
            return
        seconds = self._sampler.step_ended(reducer.served, self._clock())
        if seconds is None:
            return
        slowest = self._largest(torch.tensor([seconds], dtype=torch.float64, device="cpu"), "time")
        decision = torch.full((4,), -1, dtype=torch.int64, device="cpu")
        if self._search is not None:
            self._decide(self._search, float(slowest[0]), decision)
        *sizes, finished = self._largest(decision, "choice").tolist()
        self.finished = bool(finished)
        choice = Choice(*sizes)
        if choice != self.choice:
            self.choice = choice
            self._apply(reducer)
        self._sampler.resume(self._clock())

    def _decide(self, search: TuningSearch, seconds: float, decision: torch.Tensor) -> None:
        """Write the next setting into `decision`, and whether it stays."""
        self._report.sample(self.choice, seconds, warmup=search.warming_up)
        search.record(seconds)
        decision.copy_(torch.tensor([*search.choice, int(search.finished)], device="cpu"))
        if search.finished:
            best = search.choice
            self._report.winner(best, search.seconds_of(best), search.seconds_of(self._start))

    def _largest(self, values: torch.Tensor, what: str) -> torch.Tensor:
        name = f"{self._name}.autotune.{what}"
        return allreduce(values, op=ReduceOp.MAX, name=name, process_set=self._process_set)

    def _apply(self, reducer: PlannedReducer) -> None:
        self.attach(reducer)
        self._controller.cycle_seconds = self.choice.cycle_microseconds / 1e6


def tune(tuner: Tuner | None, reducer: PlannedReducer, name: str, process_set: ProcessSet | None) -> Tuner | None:
    """Return the tuner for a new reducer: that of its optimizer, or a new one for the first optimizer of a set.

    Several would measure each other's steps: other optimizers are not tuned, and get None.
    """
    if tuner is None and name == FIRST_NAME:
        return Tuner(reducer, name, process_set, current().knobs)
    if tuner is not None:
        tuner.attach(reducer)
    return tuner
