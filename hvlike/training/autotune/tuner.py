"""Tunes the reduction of one optimizer while it trains; all ranks change to another setting after the same step.

After each sample the ranks exchange two tiny named reductions: the time of a step, of which the largest counts, and
the setting that follows, which the first rank of the set decides. The rest of the time nothing is sent.
The results of training stay the same to the last bit: the sizes only say what travels together.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from hvlike.collectives.allreduce import allreduce
from hvlike.collectives.context import current
from hvlike.collectives.plan import BucketSizes
from hvlike.collectives.planned import PlannedReducer
from hvlike.collectives.process_set import ProcessSet
from hvlike.config import Knobs
from hvlike.planes.ops import ReduceOp
from hvlike.training.autotune.candidates import Choice, make_candidates
from hvlike.training.autotune.decider import Decider
from hvlike.training.autotune.report import Report
from hvlike.training.autotune.sample import Sampler

FIRST_NAME = "DistributedOptimizer.noname.0"
"""What the first optimizer that reduces in a process set is called between ranks."""


class Tuner:
    """One search, from the first sample to the setting that stays."""

    def __init__(
        self,
        reducer: PlannedReducer,
        name: str,
        process_set: ProcessSet | None,
        knobs: Knobs,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """reducer: whose sizes are tuned; name: for the messages, the same on every rank. Local.

        Raises: UsageError where the log or the file of knobs cannot be written.
        """
        self.finished = False
        """The setting stays; nothing is measured any more."""
        self.choice = Choice(*reducer.sizes, round(1000 * knobs.cycle_time))
        self._name = name
        self._process_set = process_set
        membership = current().membership(process_set, "Autotune")
        self._negotiator = membership.negotiator
        self._size = membership.group.size
        self._clock = clock
        self._sampler = Sampler(knobs.autotune_steps_per_sample)
        self._decider: Decider | None = None
        if membership.group.rank == 0:
            self._decider = Decider(
                make_candidates(self.choice, reducer.total_bytes, overlaps=reducer.overlaps),
                warmup=knobs.autotune_warmup_samples,
                samples=knobs.autotune_max_samples,
                noise=knobs.autotune_noise,
            )
            self._report = Report(knobs.autotune_log, knobs.autotune_file)
            self._start = self.choice

    def attach(self, reducer: PlannedReducer) -> None:
        """Let a reducer that has no plan yet use the current setting. Local."""
        reducer.resize(BucketSizes(self.choice.bucket_bytes, self.choice.first_bucket_bytes))

    def step_ended(self, reducer: PlannedReducer) -> None:
        """A reduction has ended on all ranks; at the end of a sample, go on to the next setting.

        Collective over the process set; blocks at the end of a sample only.
        Raises: PeerLeftError, ShutdownError, as the reduction itself.
        """
        schedule = reducer.schedule
        if self.finished or schedule is None or schedule.active < self._size:
            # Ranks that have joined neither count steps nor exchange; when all have, plans and counts start anew.
            return
        seconds = self._sampler.step_ended(reducer.served, self._clock())
        if seconds is None:
            return
        slowest = self._largest(torch.tensor([seconds], dtype=torch.float64, device="cpu"), "time")
        decision = torch.full((4,), -1, dtype=torch.int64, device="cpu")
        if self._decider is not None:
            self._decide(self._decider, float(slowest[0]), decision)
        *sizes, finished = self._largest(decision, "choice").tolist()
        self.finished = bool(finished)
        choice = Choice(*sizes)
        if choice != self.choice:
            self.choice = choice
            self._apply(reducer)
        self._sampler.resume(self._clock())

    def _decide(self, decider: Decider, seconds: float, decision: torch.Tensor) -> None:
        """Write the next setting into `decision`, and whether it stays."""
        self._report.sample(self.choice, seconds, warmup=decider.warming_up)
        decider.hear(seconds)
        decision.copy_(torch.tensor([*decider.choice, int(decider.finished)], device="cpu"))
        if decider.finished:
            best = decider.choice
            self._report.winner(best, decider.seconds_of(best), decider.seconds_of(self._start))

    def _largest(self, values: torch.Tensor, what: str) -> torch.Tensor:
        name = f"{self._name}.autotune.{what}"
        return allreduce(values, op=ReduceOp.MAX, name=name, process_set=self._process_set)

    def _apply(self, reducer: PlannedReducer) -> None:
        self.attach(reducer)
        self._negotiator.cycle_seconds = self.choice.cycle_microseconds / 1e6


def tune(tuner: Tuner | None, reducer: PlannedReducer, name: str, process_set: ProcessSet | None) -> Tuner | None:
    """The tuner for a new reducer: the one that its optimizer has, or a new one for the first optimizer of a set.

    Others would measure each other's steps: they are not tuned, and None is returned.
    """
    if tuner is None and name == FIRST_NAME:
        return Tuner(reducer, name, process_set, current().knobs)
    if tuner is not None:
        tuner.attach(reducer)
    return tuner
