"""What a check says: what it found, whether that is right, what to do; and the words for versions, sizes and ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from hvlike.collectives.requests.message_table import name_ranks
from hvlike.doctor.job import Case, RankFacts
from hvlike.doctor.probe import Gap


class Verdict(Enum):
    """Whether what was found is right."""

    OK = "ok"
    WARN = "warn"
    """It works, but slower or less safely than it could."""
    FAIL = "FAIL"
    """It does not work; the exit status is 1."""
    SKIP = "skip"
    """There is nothing to judge here."""


_GRAVITY = (Verdict.SKIP, Verdict.OK, Verdict.WARN, Verdict.FAIL)


@dataclass(frozen=True)
class Finding:
    """The answer of one rung."""

    verdict: Verdict
    found: tuple[str, ...]
    """One sentence or figure a line."""
    advice: tuple[str, ...] = ()
    """What to do; empty where nothing has to be done."""


def ok(*found: str) -> Finding:
    """It is right."""
    return Finding(Verdict.OK, found)


def skip(*found: str) -> Finding:
    """There is nothing to judge."""
    return Finding(Verdict.SKIP, found)


@dataclass(frozen=True)
class Remark:
    """One thing that is not right, and what to do about it."""

    verdict: Verdict
    text: str
    advice: str


def warn(text: str, advice: str) -> Remark:
    """It works, but not well."""
    return Remark(Verdict.WARN, text, advice)


def fail(text: str, advice: str) -> Remark:
    """It does not work."""
    return Remark(Verdict.FAIL, text, advice)


def conclude(found: list[str], remarks: list[Remark]) -> Finding:
    """The finding of a rung that looked at several things: as grave as the gravest remark, ok without any."""
    gravest = max((each.verdict for each in remarks), key=_GRAVITY.index, default=Verdict.OK)
    # Several ranks may earn the same remark.
    texts = list(dict.fromkeys([*found, *(each.text for each in remarks)]))
    advice = list(dict.fromkeys(each.advice for each in remarks if each.advice))
    return Finding(gravest, tuple(texts), tuple(advice))


T = TypeVar("T")
H = TypeVar("H", bound=Hashable)


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "2.13.0+cpu" is (2, 13, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match.group().split("."))) if match else ()


def in_bytes(count: float) -> str:
    """A number of bytes with the unit in which it is short: 64 MiB, 1.5 GiB."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if count >= 10 or count == int(count) else f"{count:.1f} {unit}"


def in_seconds(seconds: float) -> str:
    """A time with the unit in which it is short: 87 us, 4.2 ms, 1.3 s."""
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        if seconds * factor < 1000:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def nccl_version(number: int) -> str:
    """22703 is 2.27.3; 0 is none."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}" if number else "none"


def of_every_rank(case: Case, fact: Callable[[RankFacts], T | Gap]) -> list[tuple[int, T]]:
    """(rank, fact) of the ranks that could find it out."""
    answers = ((rank, fact(each)) for rank, each in enumerate(case.ranks))
    return [(rank, answer) for rank, answer in answers if not isinstance(answer, Gap)]


def by_value(pairs: Sequence[tuple[int, H]]) -> list[tuple[H, str]]:
    """The different values, each with the ranks that have it in words, in the order of the ranks."""
    ranks: dict[H, list[int]] = {}
    for rank, value in pairs:
        ranks.setdefault(value, []).append(rank)
    return [(value, name_ranks(have)) for value, have in ranks.items()]
