"""Which way a reduction across nodes takes, and what it costs by the LogGP model: pure functions, and the measurement.

A message of n bytes takes o on its sender, L + n G on the way and o on its receiver; a rank starts messages at least
g apart (Culler et al. 1993, LogP; Alexandrov et al. 1995, LogGP). Additions are counted by the byte.

Every way is a sequence of levels; at one of radix f groups of f ranks exchange what they hold (Ruefenacht et al. 2017).

                      one level of all n ranks       levels of 2
    whole             swap: n - 1 messages           recursive doubling
    in shards         pairwise exchange              recursive halving and doubling

Whole: all that a rank holds goes to each other of its group. In shards: it goes to the owners of its parts, and results
come back the same way: half the bytes or less, and twice the steps.

The levels are prime factors of n, some of them merged: then a sum has one order whichever way is chosen
(partition.py).
"""

from __future__ import annotations

import functools
import math
import statistics
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hvlike.backends.network.partition import primes
from hvlike.system.system import system
from hvlike.transport.loop.coroutine import Coroutine, complete
from hvlike.transport.loop.socket_events import SocketEvents
from hvlike.transport.memory.dtypes import MpiConstants

ASKING_BYTES_PER_SECOND = 500e6
"""On slower networks no message asks: 13 MiB over 3 Gbit/s took 42 ms, 60 where they ask; over 10 Gbit/s 17 ms each."""
LARGEST_GROUP = 32
"""A rank has so many peers at a level: each is a connection, and they all send to it at once. LogGP knows neither."""


@dataclass(frozen=True)
class NetworkConstants:
    latency: float  # L: a small message on its way
    overhead: float  # o: work of the sender for a message, and again of the receiver
    gap: float  # g: between the starts of two messages of a rank
    gap_per_byte: float  # G: one over the bandwidth of a node's link
    fold: float  # Seconds per byte for adding received bytes


@dataclass(frozen=True)
class MeasuredNetwork(NetworkConstants):
    eager_bytes: int = 0  # A message of so many leaves at once, without asking the receiver; 0: not known
    paced: bool = False  # TCP spaces its packets out (BBR)

    @property
    def is_slow(self) -> bool:
        return self.gap_per_byte > 1 / ASKING_BYTES_PER_SECOND

    @property
    def early_bytes(self) -> int:
        """Up to so many bytes for a rank go in messages that do not ask. To ask takes a message there and back; without
        it MPI copies the bytes once more. On a slow network that costs nothing, and a question queues behind data.
        Where packets are spaced out, what asks takes twice as long at any length.
        """
        if self.paced or self.is_slow:
            return sys.maxsize
        return int(2 * self.latency / max(self.fold, 1e-12))


TYPICAL = MeasuredNetwork(latency=30e-6, overhead=25e-6, gap=25e-6, gap_per_byte=0.8e-9, fold=0.2e-9)
"""Of TCP between two hosts, where nothing was measured."""


class Way(NamedTuple):
    sharded: bool
    levels: tuple[int, ...]  # Their product is `members(ranks)`

    @property
    def name(self) -> str:
        if len(self.levels) < 2:
            return "pairwise" if self.sharded else "swap"
        return "halving" if self.sharded else "doubling"


def is_direct(way: Way) -> bool:
    """Whether every rank sends to every other one."""
    return len(way.levels) < 2


@functools.cache
def members(ranks: int) -> int:
    """How many ranks take part in the levels: the largest number without a prime factor above LARGEST_GROUP. Each of
    the others gives its contribution to one of these before, and gets the result after.
    """
    return next(each for each in range(ranks, 0, -1) if max(primes(each), default=1) <= LARGEST_GROUP)


def message(c: NetworkConstants, nbytes: float, sharing: int = 1) -> float:
    """Seconds from the call of the sender to the end of the call of the receiver."""
    return 2 * c.overhead + c.latency + nbytes * c.gap_per_byte * sharing


def _exchange(c: NetworkConstants, radix: int, nbytes: float, sharing: int) -> float:
    """A message of so many bytes to each other rank of a group, and one from each."""
    peers = radix - 1
    return peers * max(c.gap, 2 * c.overhead) + c.latency + peers * nbytes * c.gap_per_byte * sharing


def level(c: NetworkConstants, radix: int, nbytes: float, sharing: int, *, sharded: bool, only: bool) -> float:
    """A level at which every rank holds so many bytes. only: there is no other one; else parts have extra headers."""
    part = nbytes / radix if sharded else nbytes
    seconds = (1 + sharded) * _exchange(c, radix, part, sharing) + (radix - 1) * part * c.fold
    return seconds + (radix - 1) * max(c.gap, 2 * c.overhead) if sharded and not only else seconds


def cost(c: NetworkConstants, ranks: int, nbytes: float, way: Way, sharing: int = 1) -> float:
    """Seconds of a reduction. sharing: how many ranks share a link, each with a reduction of its own.

    For several levels all is packed before and unpacked afterwards: a copy takes about as long as an addition.
    """
    seconds, held = 0.0 if is_direct(way) else 2 * nbytes * c.fold, nbytes
    for radix in way.levels:
        seconds += level(c, radix, held, sharing, sharded=way.sharded, only=is_direct(way))
        held = held / radix if way.sharded else held
    if ranks > members(ranks):
        seconds += 2 * message(c, nbytes, sharing) + nbytes * c.fold
    return seconds


def ways(c: NetworkConstants, ranks: int, nbytes: float, sharing: int = 1) -> list[Way]:
    """The cheapest levels whole and in shards. Factors that follow each other are merged where that costs less."""
    return [_levels(c, members(ranks), nbytes, sharing, sharded=each) for each in (False, True)]


def _levels(c: NetworkConstants, ranks: int, nbytes: float, sharing: int, *, sharded: bool) -> Way:
    factors = primes(ranks)
    found: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]  # The best levels for the first factors
    for end in range(1, len(factors) + 1):
        best: tuple[float, tuple[int, ...]] = (math.inf, ())
        for start in range(end):
            radix = math.prod(factors[start:end])
            if radix <= LARGEST_GROUP:
                seconds, before = found[start]
                held = nbytes / math.prod(before) if sharded else nbytes
                seconds += level(c, radix, held, sharing, sharded=sharded, only=False)
                best = min(best, (seconds, (*before, radix)))
        found.append(best)
    return Way(sharded, found[-1][1])


def choose(c: NetworkConstants, ranks: int, nbytes: float, sharing: int = 1, widened: float = 1.0) -> Way:
    """The cheapest way for so many bytes; the same on all ranks where the constants are.

    widened: by how much sums of some ranks are larger than contributions, where they travel: at more than one level.
    """
    found = ways(c, ranks, nbytes * widened, sharing)
    if ranks <= LARGEST_GROUP:
        found += [Way(sharded, (ranks,)) for sharded in (False, True)]

    def seconds(way: Way) -> float:
        return cost(c, ranks, nbytes * widened if len(way.levels) > 1 else nbytes, way, sharing)

    return min(found, key=seconds)


def best(c: NetworkConstants, ranks: int, nbytes: float, sharing: int = 1) -> float:
    """Seconds of the cheapest way."""
    return cost(c, ranks, nbytes, choose(c, ranks, nbytes, sharing), sharing)


ROUNDS = 12  # Of messages of each size
FOLDED_BYTES = 2 << 20  # Of a sum; more than the caches of a core keep of three arrays

_SMALL, _LARGE = 8, 256 << 10
_IN_A_ROW = 4  # Rounds of small messages, whose mean is the latency where it is the least
_TAG = 7
_MIB = 1 << 20


def measure(comm: Any, sockets: SocketEvents, eager_bytes: int) -> Coroutine[MeasuredNetwork]:
    """Measure in a few milliseconds, and agree on the slowest of all ranks. Collective, two ranks or more.

    sockets: learn whether the messages come over them. eager_bytes: of MeasuredNetwork, where they do.

    A round lasts until a rank has looked, as in a reduction. The fastest count: in others a rank may have come late, or
    waited for a core. Of small messages the fastest in a row, as a rank that comes late finds the next one there.
    """
    natives = MpiConstants()
    calls, rounds = yield from _rounds(comm, natives.byte, _SMALL)
    sockets.scan()
    _, large = yield from _rounds(comm, natives.byte, _LARGE)
    sockets.check_carry()
    called = statistics.median(calls)
    small = min(statistics.fmean(rounds[first : first + _IN_A_ROW]) for first in range(len(rounds) - _IN_A_ROW + 1))
    overhead = called / 2
    latency = max(0.0, small - called)
    per_byte = max(0.0, min(large) - small) / _LARGE
    times = [1e9 * latency, 1e9 * overhead, 1e9 * _MIB * per_byte, 1e9 * _MIB * _fold()]
    mine = np.array([*times, -eager_bytes if sockets.carry else 0, sockets.paced]).astype(np.int64)
    shared = [mine.view(np.uint8), len(mine), natives.int64]
    yield from complete([comm.Iallreduce(natives.in_place, shared, natives.max)])
    latency, overhead, gap, fold = (1e-9 * each for each in mine[:4].tolist())
    return MeasuredNetwork(latency, overhead, overhead, gap / _MIB, fold / _MIB, -int(mine[4]), bool(mine[5]))


def _rounds(comm: Any, byte: Any, nbytes: int) -> Coroutine[tuple[list[float], list[float]]]:
    """Seconds of the calls that begin a message in each direction, and until both have ended, of each round."""
    rank, size = comm.Get_rank(), comm.Get_size()
    sent, received = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    called, ended = [], []
    for _ in range(ROUNDS):
        start = system.perf_counter()
        receive = comm.Irecv([received, byte], (rank - 1) % size, _TAG)
        send = comm.Isend([sent, byte], (rank + 1) % size, _TAG)
        called.append(system.perf_counter() - start)
        yield from complete([receive, send])
        ended.append(system.perf_counter() - start)
    return called, ended


def _fold() -> float:
    """Seconds per byte of an addition."""
    mine, other = (np.zeros(FOLDED_BYTES // 4, np.float32) for _ in range(2))
    mine += other  # Only now the system gives the memory
    start = system.perf_counter()
    mine += other
    return (system.perf_counter() - start) / FOLDED_BYTES
