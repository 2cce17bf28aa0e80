"""Means over what several ranks have measured, from sums and counts that come bit by bit."""

from __future__ import annotations

from collections.abc import Mapping

Sums = Mapping[str, tuple[float, int]]
"""For each quantity the sum of some values, and how many they are."""


class Means:
    """Means of named quantities."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}

    def add(self, sums: Sums) -> None:
        """More values have come."""
        for name, (total, count) in sums.items():
            before, counted = self._sums.get(name, (0.0, 0))
            self._sums[name] = (before + total, counted + count)

    def means(self) -> dict[str, float]:
        """The mean of each quantity over all values that have come, in the order of their first appearance."""
        return {name: total / count for name, (total, count) in self._sums.items()}

    def take(self) -> dict[str, tuple[float, int]]:
        """What has come since the last time, which is forgotten here."""
        sums, self._sums = self._sums, {}
        return sums
