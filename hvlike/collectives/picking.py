"""Choosing the same items from one list after another, in one call each time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any


def pick(indices: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return a function that gives these items of a list, as a tuple: pick([2, 0])("abc") -> ("c", "a")."""
    if len(indices) > 1:
        return itemgetter(*indices)
    return lambda items: tuple(items[index] for index in indices)
