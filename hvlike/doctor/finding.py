"""What a rung of the ladder says: what it found, whether that is right, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


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
