"""Which of many jobs the tests try: others from commit to commit, so that all have their turn."""

import subprocess
from zlib import crc32

from support.job import CHECKOUT


def number_of_commit() -> int:
    """A number that is another one in the next commit; the same for all who run this one."""
    asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=CHECKOUT, capture_output=True, text=True, check=False)
    return int(asked.stdout[:8] or "0", 16)


def cases_of(number: int, cases: int, tried: int) -> set[int]:
    """Return which of so many cases the commit of this number tries; commits in a row come to all of them."""
    return {(number * tried + place) % cases for place in range(min(tried, cases))}


def is_tried(name: str, number: int, cases: int, tried: int, of: int = 0) -> list[bool]:
    """Return of each case whether the commit of this number tries it.

    name: of the test or module. of: it counts as so many cases, if it has fewer: one of five is tried by each fifth
    commit.
    """
    count = max(cases, of)
    chosen = cases_of(number, count, tried)
    return [(crc32(name.encode()) + place) % count in chosen for place in range(cases)]
