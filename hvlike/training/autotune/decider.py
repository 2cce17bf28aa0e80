"""The search from its first sample to its end. Pure logic; lives on the first rank of the set."""

from __future__ import annotations

from collections.abc import Sequence

from hvlike.training.autotune.candidates import Choice, coordinates
from hvlike.training.autotune.search import Measurement, best_measured, suggest, unit_cube


class Decider:
    """Hears the time of each sample and says which setting comes next."""

    def __init__(self, table: Sequence[Choice], *, warmup: int, samples: int, noise: float) -> None:
        """table: the choices, the one in use first; warmup: samples that do not count; samples: how many do."""
        self.choice = table[0]
        """The setting in use."""
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
        """The next sample will be thrown away."""
        return self._warmup > 0

    def hear(self, seconds: float) -> None:
        """A sample of the setting in use is complete; afterwards `choice` is the next one."""
        if self._warmup:
            self._warmup -= 1
            return
        self._measured.append(Measurement(self._index, seconds))
        self.finished = len(self._measured) >= self._samples
        choose = best_measured if self.finished else suggest
        self._index = choose(self._points, self._measured, self._noise)
        self.choice = self._table[self._index]

    def seconds_of(self, choice: Choice) -> float:
        """The shortest time measured with a choice that was in use."""
        return min(each.seconds for each in self._measured if self._table[each.point] == choice)
