"""What a check says: what it found, whether that is right, what to do; and the words for it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from enum import Enum
from typing import TypeVar

from hvlike.collectives.requests.message_table import name_ranks

H = TypeVar("H", bound=Hashable)


class Verdict(Enum):
    OK = "ok"
    WARN = "warn"  # It works, but slower or less safely than it could
    FAIL = "FAIL"  # It does not work; the exit status is 1
    SKIP = "skip"  # There is nothing to check here


class Finding:
    """The result of one check. What several ranks have in common is told once."""

    def __init__(self, verdict: Verdict = Verdict.OK) -> None:
        self.verdict = verdict
        self.found: list[str] = []  # One sentence or figure a line
        self.advice: list[str] = []

    def note(self, *texts: str) -> None:
        self.found += [text for text in dict.fromkeys(texts) if text not in self.found]

    def warn(self, text: str, advice: str) -> None:
        """Add something that works, but not well, and what to do about it."""
        self._blame(Verdict.WARN, text, advice)

    def fail(self, text: str, advice: str, output: Iterable[str] = ()) -> None:
        """Add something that does not work, and what to do about it. output: what another program has printed."""
        self._blame(Verdict.FAIL, text, advice)
        self.note(*(f"| {line}" for line in output))

    def _blame(self, verdict: Verdict, text: str, advice: str) -> None:
        self.note(text)
        if advice not in self.advice:
            self.advice.append(advice)
        if self.verdict is not Verdict.FAIL:
            self.verdict = verdict


def plural(count: int, noun: str) -> str:
    """Return "1 rank" or "2 ranks"."""
    return f"{count} {noun}{'s' * (count != 1)}"


def by_value(pairs: Iterable[tuple[int, H]]) -> list[tuple[H, str]]:
    """Return the different values, each with the names of the ranks that have it, in the order of the ranks."""
    ranks: dict[H, list[int]] = {}
    for rank, value in pairs:
        ranks.setdefault(value, []).append(rank)
    return [(value, name_ranks(have)) for value, have in ranks.items()]
