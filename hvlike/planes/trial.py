"""Which of two ways to do the same work is faster on this machine: tried in turn at first, and anew now and then.

All ranks record the same times, those of the slowest of them, and so choose the same.
"""

from __future__ import annotations

import statistics

ROUNDS = 4
"""How often each way is tried; the first time counts for nothing, as memory is touched then that never was."""

PERIOD = 1000
"""After so many uses all begins anew: cores of a virtual machine may have moved farther apart."""

MOST_KNOWN = 1024
"""Kinds of work that are remembered; with one more all are tried anew."""


class Trial:
    """Of one kind of work. The ways are False and True."""

    def __init__(self) -> None:
        self._uses = 0
        self._times: tuple[list[int], list[int]] = ([], [])
        self._chosen = False

    @property
    def next(self) -> tuple[bool, bool]:
        """The way of the next use, and whether it is to be timed and recorded."""
        if self._uses < 2 * ROUNDS:
            return self._uses % 2 == 1, True
        return self._chosen, False

    def record(self, nanoseconds: int) -> None:
        """What the use that was to be timed has taken on the slowest rank."""
        self._times[self._uses % 2].append(nanoseconds)
        self._uses += 1
        if self._uses == 2 * ROUNDS:
            first, second = (statistics.median(times[1:]) for times in self._times)
            self._chosen = second < first

    def pass_by(self) -> None:
        """There was a use that was not timed."""
        self._uses += 1
        if self._uses == PERIOD:
            self._uses = 0
            self._times = ([], [])


class Trials:
    """The trials of all kinds of work of a region, by numbers that the ranks agree on."""

    def __init__(self) -> None:
        self._known: dict[int, Trial] = {}

    def of(self, number: int) -> Trial:
        """The trial of a kind of work, which begins if it is not known."""
        return self._known.get(number) or Trial()

    def keep(self, number: int, trial: Trial) -> None:
        """Remember it; called by all ranks after the same work, so that they forget at the same time, too."""
        if number not in self._known and len(self._known) >= MOST_KNOWN:
            self._known.clear()
        self._known[number] = trial
