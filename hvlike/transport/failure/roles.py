"""Who trains and who waits, under fault tolerance, and which number each process has. Pure functions of plain data.

    position       0    1    2    3    4      in the communicator of all processes that are left
    number         0    1    2    -    -      of those that train; the others are spares
                        lost
    position       0         1    2    3
    number         0         2    1    -      the first spare takes the number of the lost one

Without a spare the numbers close up: there is one rank less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Roles:
    """The same on all processes, but for `number`, and for `renumbered` where a loss has interrupted a restart."""

    number: int | None  # Of this process; None for a spare
    size: int  # How many train
    spares: tuple[int, ...]  # Positions
    renumbered: Mapping[int, int]  # From the numbers at the last `settled` to those of now

    @classmethod
    def at_start(cls, position: int, processes: int, spares: int) -> Roles:
        """The last `spares` processes wait. position: of this one."""
        size = processes - spares
        number = position if position < size else None
        return cls(number, size, tuple(range(size, processes)), {each: each for each in range(size)})

    def settled(self) -> Roles:
        """These roles; from here on `renumbered` begins with the numbers of now. Processes may settle after different
        restarts, as another loss can interrupt one of them anywhere.
        """
        return replace(self, renumbered={each: each for each in range(self.size)})

    def after_loss(self, position: int, told: Sequence[tuple[int | None, int, bool]]) -> Roles:
        """The roles among those that are left. told: by position, the number of each, how many trained, as far as it
        knows, and whether it has the state of the training.
        """
        previous, sizes, holds = zip(*told, strict=True)
        filled = assign_numbers(previous, max(sizes), holds)
        places = {number: place for place, number in enumerate(sorted(n for n in filled if n is not None))}
        numbers = [None if number is None else places[number] for number in filled]
        return Roles(
            numbers[position],
            sum(number is not None for number in numbers),
            tuple(place for place, number in enumerate(numbers) if number is None),
            {first: places[number] for first, number in self.renumbered.items() if number in places},
        )


def assign_numbers(previous: Sequence[int | None], size: int, holds: Sequence[bool]) -> list[int | None]:
    """Who has which number after a loss, before the ranks close up. previous: for each survivor the number it had, None
    for a spare. size: how many ranks there were. holds: who has the state of the training. Spares take the numbers of
    those that are lost; without spares each keeps its own. The lowest number is one's that has the state, if any does.
    """
    numbers = list(previous)
    holders = [(number, place) for place, number in enumerate(previous) if number is not None and holds[place]]
    start = 0 if None in previous else min(number for number in previous if number is not None)
    if holders and min(holders)[0] != start:
        lowest, first = min(holders)
        if start in numbers:
            numbers[numbers.index(start)] = lowest
        numbers[first] = start
    missing = [number for number in range(size) if number not in numbers]
    for place, number in enumerate(numbers):
        if number is None and missing:
            numbers[place] = missing.pop(0)
    return numbers
