"""Versions and sizes as the rungs compare and print them."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from hvlike.collectives.agreement import name_ranks
from hvlike.doctor.case import Case
from hvlike.doctor.facts.rank import RankFacts
from hvlike.doctor.probe import Gap

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
