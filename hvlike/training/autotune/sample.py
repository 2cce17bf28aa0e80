"""Which step times make a sample. Pure logic: the clock is the caller's."""

from __future__ import annotations

import numpy as np


class Sampler:
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
        """Note the end of a step at `now` seconds; the median time of a step once a sample is complete."""
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
        """Start the clock again after something that is no part of a step."""
        self._last = now
