"""How many cores the ranks of a node have, and what follows for waiting. Pure functions over sets."""

from __future__ import annotations

import os
from collections.abc import Sequence

SPINS = 100
"""Looks before a waiting driver sleeps: about as long as waking a sleeper takes."""


def available() -> frozenset[int]:
    """The cores on which this process may run."""
    return frozenset(os.sched_getaffinity(0))


def cores_per_rank(affinities: Sequence[frozenset[int]], rank: int) -> float:
    """Cores of local rank `rank`, each divided by the number of local ranks that may run on it.

    Two ranks bound to a core each: 1.0. Four ranks free on two cores: 0.5. Two ranks free on eight: 4.0.
    """
    return sum(1 / sum(core in each for each in affinities) for core in affinities[rank])


def any_crowded(affinities: Sequence[frozenset[int]]) -> bool:
    """Whether any rank of the node shares cores: the same on all of them."""
    return any(is_crowded(cores_per_rank(affinities, rank)) for rank in range(len(affinities)))


def is_crowded(cores: float) -> bool:
    """True where ranks share cores, so that a waiting one should let the others run."""
    return cores < 1


def has_spare_core(cores: float) -> bool:
    """True where the background thread can work beside the main thread."""
    return cores >= 2
