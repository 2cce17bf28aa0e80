"""Which of many jobs the tests try: others from commit to commit, so that all have their turn."""

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from zlib import crc32

from support.job import CHECKOUT


def number_of_commit() -> int:
    """A number that is another one in the next commit; the same for all who run this one."""
    asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=CHECKOUT, capture_output=True, text=True, check=False)
    return int(asked.stdout[:8] or "0", 16)


def cases_of(number: int, cases: int, tried: int) -> set[int]:
    """Return which of so many cases the commit of this number tries; commits in a row come to all of them."""
    return {(number * tried + place) % cases for place in range(min(tried, cases))}


@dataclass(frozen=True)
class Turn:
    """What a test or a module says by its mark `in_turn`.

    Attributes:
        cases: so many it has.
        tried: so many of them a commit tries.
        of: it counts as so many cases, if it has fewer: one of five is tried by each fifth commit.
    """

    cases: int
    tried: int
    of: int = 0

    def of_commit(self, name: str, number: int) -> list[bool]:
        """Return of each case whether the commit of this number tries it."""
        count = max(self.cases, self.of)
        chosen = cases_of(number, count, self.tried)
        return [(crc32(name.encode()) + place) % count in chosen for place in range(self.cases)]


def tried_by(number: int, turns: Mapping[str, Turn], alone: bool) -> dict[str, list[bool]]:
    """Return of each case of each test whether the commit of this number tries it.

    turns: by name of the test or module. alone: there is nothing else to try, so some of these are: a run that tries
    nothing has failed.
    """
    tried = {name: turn.of_commit(name, number) for name, turn in turns.items()}
    if alone and turns and not any(any(cases) for cases in tried.values()):
        name = sorted(turns)[number % len(turns)]
        tried[name] = Turn(turns[name].cases, turns[name].tried).of_commit(name, number)
    return tried
