"""What a check says: what it found, whether that is right, what to do; and the words for versions, sizes and ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

from hvlike.collectives.requests.message_table import name_ranks
from hvlike.doctor.probe import Gap

if TYPE_CHECKING:
    from hvlike.doctor.job import Case, RankFacts

T = TypeVar("T")
H = TypeVar("H", bound=Hashable)


class Verdict(Enum):
    OK = "ok"
    WARN = "warn"  # It works, but slower or less safely than it could
    FAIL = "FAIL"  # It does not work; the exit status is 1
    SKIP = "skip"  # There is nothing to check here


class Skipped(Exception):
    """A check does not apply: its arguments, texts, say why."""


class Finding:
    """The result of one check: what was found, then what is wrong with it."""

    def __init__(self, *notes: str, skipped: bool = False) -> None:
        self._notes = list(notes)
        self._problems: list[tuple[Verdict, str, str]] = []
        self._skipped = skipped

    def note(self, *texts: str) -> None:
        self._notes += texts

    def warn(self, text: str, advice: str) -> None:
        """Add something that works, but not well, and what to do about it."""
        self._problems.append((Verdict.WARN, text, advice))

    def fail(self, text: str, advice: str) -> None:
        """Add something that does not work, and what to do about it."""
        self._problems.append((Verdict.FAIL, text, advice))

    @property
    def verdict(self) -> Verdict:
        verdicts = {verdict for verdict, _, _ in self._problems}
        calm = Verdict.SKIP if self._skipped else Verdict.OK
        return next((each for each in (Verdict.FAIL, Verdict.WARN) if each in verdicts), calm)

    @property
    def found(self) -> list[str]:
        """One sentence or figure a line. Several ranks may have the same problem, which is told once."""
        return [each for each in dict.fromkeys([*self._notes, *(text for _, text, _ in self._problems)]) if each]

    @property
    def advice(self) -> list[str]:
        return [each for each in dict.fromkeys(advice for _, _, advice in self._problems) if each]


def numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (2, 13, 0) of "2.13.0+cpu"."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match.group().split("."))) if match else ()


def plural(count: int, noun: str) -> str:
    """Return "1 rank" or "2 ranks"."""
    return f"{count} {noun}{'s' * (count != 1)}"


def quoted(lines: Iterable[str]) -> list[str]:
    """Return what another program has printed, so that one sees it."""
    return [f"| {line}" for line in lines]


def nccl_version(number: int) -> str:
    """Return 2.27.3 for 22703, and "none" for 0."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}" if number else "none"


def of_every_rank(case: Case, fact: Callable[[RankFacts], T | Gap]) -> list[tuple[int, T]]:
    """Return (rank, fact) of the ranks that could find it out."""
    answers = ((rank, fact(each)) for rank, each in enumerate(case.ranks))
    return [(rank, answer) for rank, answer in answers if not isinstance(answer, Gap)]


def by_value(pairs: Iterable[tuple[int, H]]) -> list[tuple[H, str]]:
    """Return the different values, each with the names of the ranks that have it, in the order of the ranks."""
    ranks: dict[H, list[int]] = {}
    for rank, value in pairs:
        ranks.setdefault(value, []).append(rank)
    return [(value, name_ranks(have)) for value, have in ranks.items()]
