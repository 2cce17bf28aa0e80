"""What a training step costs on many ranks, after the LogGP model. Pure functions of measured constants.

A message of n bytes takes o on its sender, L + n G on the way and o on its receiver; a rank starts messages at least
g apart (Culler et al. 1993, LogP; Alexandrov et al. 1995, LogGP). Added here: G is that of a node's link, which its
ranks share; memory inside a node has constants of its own; a coordinator does some work for every message it gets.
Everything is counted in seconds and bytes, and nothing is assumed to overlap.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Constants:
    """What is measured."""

    latency: float
    """L: a small message on its way."""
    overhead: float
    """o: work of the sender for a message, and again of the receiver."""
    gap: float
    """g: between the starts of two messages of a rank."""
    gap_per_byte: float
    """G: one over the bandwidth of a node's link."""
    fold: float
    """Seconds a byte for adding what has come."""
    memory: float
    """Seconds a byte for a reduction over two ranks of a node, in shared memory."""
    memory_floor: float
    """Seconds for a reduction of nothing over two ranks of a node."""
    take: float
    """Work of the coordinator for a message that says what a rank is ready for."""
    take_entry: float
    """The same for every tensor named in it."""
    tell: float
    """Work of the coordinator for a message that says what all shall do."""
    tell_entry: float
    entry_bytes: float
    """Size of such a message for every tensor."""


@dataclass(frozen=True)
class Workload:
    """One step of one rank."""

    nbytes: float
    """Of all gradients."""
    tensors: int
    compute: float
    """Seconds of the step without communication."""
    rounds: int = 1
    """How often in a step a rank says what is ready, where that is negotiated."""


@dataclass(frozen=True)
class Job:
    """How many ranks there are, and how many of them share a node."""

    ranks: int
    ranks_per_node: int

    @property
    def nodes(self) -> int:
        """Nodes, the last of them perhaps not full."""
        return -(-self.ranks // self.ranks_per_node)

    @property
    def local(self) -> int:
        """Ranks of a full node."""
        return min(self.ranks, self.ranks_per_node)


Across = Callable[[Constants, int, float, int], float]
"""A reduction over n participants of so many bytes each, with so many participants behind one link."""


def message(c: Constants, nbytes: float, sharing: int = 1) -> float:
    """Seconds from the call of the sender to the end of the call of the receiver."""
    return 2 * c.overhead + c.latency + nbytes * c.gap_per_byte * sharing


def ring(c: Constants, n: int, nbytes: float, sharing: int = 1) -> float:
    """Reduce-scatter and allgather around a ring: 2 (n - 1) steps, each waits for the one before."""
    steps = 2 * (n - 1)
    return steps * max(c.gap, message(c, nbytes / n, sharing)) + (n - 1) / n * nbytes * c.fold


def tree(c: Constants, n: int, nbytes: float, sharing: int = 1) -> float:
    """Reduction to a root along a binomial tree and broadcast back: 2 log n steps with all bytes."""
    return _levels(n) * (2 * message(c, nbytes, sharing) + nbytes * c.fold)


def halving(c: Constants, n: int, nbytes: float, sharing: int = 1) -> float:
    """Reduce-scatter by halving, allgather by doubling: 2 log n steps, the bytes of a ring (Thakur et al. 2005)."""
    moved = (n - 1) / n * nbytes
    return 2 * _levels(n) * message(c, 0) + moved * (2 * c.gap_per_byte * sharing + c.fold)


def pairwise(c: Constants, n: int, nbytes: float, sharing: int = 1) -> float:
    """Every rank sends its part to each owner and gets the results: 2 steps of n - 1 messages that wait for nobody."""
    if n == 1:
        return 0.0
    moved = (n - 1) / n * nbytes
    sent = max((n - 1) * max(c.gap, c.overhead), moved * c.gap_per_byte * sharing)
    return 2 * (sent + c.overhead + c.latency) + moved * c.fold


def best(c: Constants, n: int, nbytes: float, sharing: int = 1) -> float:
    """The fastest of them."""
    return min(each(c, n, nbytes, sharing) for each in (ring, tree, halving, pairwise))


def shared(c: Constants, ranks: int, nbytes: float) -> float:
    """A reduction inside a node: what was measured for two ranks, at the bytes and the peers of `ranks`."""
    return (ranks - 1) * c.memory_floor + 2 * (ranks - 1) / ranks * nbytes * c.memory


def hierarchical(c: Constants, job: Job, nbytes: float, across: Across) -> float:
    """Inside each node, across the nodes, each rank with its share of the bytes on the common link, and back."""
    return shared(c, job.local, nbytes) + across(c, job.nodes, nbytes / job.local, job.local)


def flat_ring(c: Constants, job: Job, nbytes: float) -> float:
    """A ring over all ranks, neighbours on one node next to each other: one link in and one out of every node."""
    return ring(c, job.ranks, nbytes)


def flat_tree(c: Constants, job: Job, nbytes: float) -> float:
    """A tree over all ranks; inside a node, too, by messages."""
    return tree(c, job.ranks, nbytes)


def planned(c: Constants, job: Job, work: Workload) -> float:
    """Agreement on a plan that was learned: there is no message."""
    return 0.0


def negotiated(c: Constants, job: Job, work: Workload) -> float:
    """Agreement by a coordinator: in every round it takes a message of each other rank and sends one to each."""
    members = job.ranks - 1
    if members == 0:
        return 0.0
    entries = work.tensors / work.rounds
    nbytes = entries * c.entry_bytes
    take = max(c.take + entries * c.take_entry, c.gap, nbytes * c.gap_per_byte)
    tell = max(c.tell + entries * c.tell_entry, c.gap, nbytes * c.gap_per_byte)
    return work.rounds * (members * (take + tell) + 2 * message(c, nbytes))


AGREEMENTS: dict[str, Callable[[Constants, Job, Workload], float]] = {"planned": planned, "negotiated": negotiated}

REDUCTIONS: dict[str, Callable[[Constants, Job, float], float]] = {
    "flat ring": flat_ring,
    "flat tree": flat_tree,
    "hierarchical": lambda c, job, nbytes: hierarchical(c, job, nbytes, best),
}


def step(c: Constants, job: Job, work: Workload, agreement: str, reduction: str) -> float:
    """Seconds of a step: computation, agreement and reduction after each other."""
    return work.compute + AGREEMENTS[agreement](c, job, work) + REDUCTIONS[reduction](c, job, work.nbytes)


def _levels(n: int) -> int:
    """Levels of a binary tree over n participants."""
    return math.ceil(math.log2(n))
