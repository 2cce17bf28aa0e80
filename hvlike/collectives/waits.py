"""Who waits for what: finds the moment at which nobody can go on. Pure logic, no messages.

A rank that has waited a while tells the coordinator for what. When every rank waits, and each of these waits
lacks a rank that waits for something else, nothing will ever happen again: a deadlock, not a delay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hvlike.collectives.request import Key

Counts = Mapping[str, int]
"""How many unnamed operations of each kind a rank has issued."""


@dataclass
class WaitTable:
    """The waits the members of a group have reported. Positions count within the group."""

    ranks: tuple[int, ...]
    waits: dict[int, tuple[Key, Counts]] = field(default_factory=dict)

    def report(self, position: int, key: Key, counts: Counts) -> None:
        """The member at `position` has begun to wait for `key`."""
        self.waits[position] = (key, counts)

    def resume(self, position: int) -> None:
        """The member at `position` no longer waits."""
        self.waits.pop(position, None)

    def ended(self, key: Key) -> None:
        """The operation `key` has ended, well or badly: nobody waits for it."""
        for position in [each for each, (waited, _) in self.waits.items() if waited == key]:
            del self.waits[position]

    def deadlocked(self) -> bool:
        """True when all members wait, but not all for the same."""
        return len(self.waits) == len(self.ranks) and len({key for key, _ in self.waits.values()}) > 1

    def describe(self) -> str:
        """rank 0 waits in allreduce 'x', rank 1 waits in broadcast 'y'"""
        return ", ".join(
            f"rank {self.ranks[position]} waits in {key[0]} {key[1]!r}"
            for position, (key, _) in sorted(self.waits.items())
        )

    def aligned_counts(self) -> dict[str, int]:
        """Counts of unnamed operations from which all members can go on alike."""
        return merge_counts([counts for _, counts in self.waits.values()])


def merge_counts(all_counts: Sequence[Counts]) -> dict[str, int]:
    """The highest count of each kind."""
    merged: dict[str, int] = {}
    for counts in all_counts:
        for kind, count in counts.items():
            merged[kind] = max(merged.get(kind, 0), count)
    return merged
