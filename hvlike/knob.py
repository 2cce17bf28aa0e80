"""What a knob is: a named setting with a kind of value, a default and an effect. The table of them is config.py."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

OURS, HOROVODS = "HVLIKE_", "HOROVOD_"


class Kind(NamedTuple):
    """What values a knob takes."""

    parse: Callable[[str], Any]
    """Makes the value of a text; raises ValueError for a text that is none."""
    expected: str
    """The values in words, as they stand in errors and in the documentation."""


@dataclass(frozen=True)
class Knob:
    """One setting: the environment variable without its prefix, and what is known of it."""

    name: str
    kind: Kind
    default: Any
    effect: str
    horovod: bool
    """Horovod has it too: its spelling is accepted."""
    same: bool
    """All ranks must have the same value."""

    @property
    def variable(self) -> str:
        """The environment variable."""
        return OURS + self.name

    @property
    def spellings(self) -> tuple[str, ...]:
        """The environment variables that set it; ours first."""
        return (OURS + self.name, HOROVODS + self.name) if self.horovod else (OURS + self.name,)


def knob(name: str, default: T, kind: Kind, effect: str, *, horovod: bool = False, same: bool = True) -> T:
    """A field of the table in config.py."""
    entry = Knob(name, kind, default, effect, horovod, same)
    return dataclasses.field(default=default, metadata={"knob": entry})


def whole(least: int) -> Kind:
    """Whole numbers from `least` up."""

    def parse(text: str) -> int:
        value = int(text)
        if value < least:
            raise ValueError(text)
        return value

    return Kind(parse, f"a whole number of at least {least}")


def number(least: float) -> Kind:
    """Finite numbers from `least` up."""

    def parse(text: str) -> float:
        value = float(text)
        if not math.isfinite(value) or value < least:
            raise ValueError(text)
        return value

    return Kind(parse, f"a number of at least {least:g}")


def one_of(*words: str) -> Kind:
    """One of some words, in upper or lower case."""

    def parse(text: str) -> str:
        if text.lower() not in words:
            raise ValueError(text)
        return text.lower()

    return Kind(parse, "one of " + ", ".join(words))


def _switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError(text)
    return text == "1"


def _cores(text: str) -> tuple[int, ...]:
    cores = tuple(int(part) for part in text.split(","))
    if min(cores) < 0:
        raise ValueError(text)
    return cores


SWITCH = Kind(_switch, "0 or 1")
PATH = Kind(str, "the path of a file")
CORES = Kind(_cores, "numbers of cores with commas between, one for each rank of a node")
