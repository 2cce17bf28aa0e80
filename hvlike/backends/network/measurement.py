"""The constants of a network as its ranks measure them: each sends to the next one, all at once."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np

from hvlike.backends.network.cost_model import NetworkConstants
from hvlike.transport.loop.coroutine import Coroutine, complete
from hvlike.transport.memory.dtypes import MpiConstants

_SMALL, _LARGE = 8, 256 << 10
_FOLDED = 2 << 20  # Bytes of a sum; more than the caches of a core keep of three arrays
_TAG = 7
_MIB = 1 << 20


def measure(comm: Any) -> Coroutine[NetworkConstants]:
    """Measure in a few milliseconds, and agree on the slowest of all ranks. Collective, two ranks or more.

    A round lasts until a rank has looked, as in a reduction; the median leaves out the rounds in which one came late.
    """
    natives = MpiConstants()
    called, small = yield from _rounds(comm, natives.byte, _SMALL, 9)
    _, large = yield from _rounds(comm, natives.byte, _LARGE, 5)
    overhead = called / 2
    latency = max(0.0, small - called)
    per_byte = max(0.0, large - small) / _LARGE
    mine = np.array([1e9 * latency, 1e9 * overhead, 1e9 * _MIB * per_byte, 1e9 * _MIB * _fold()]).astype(np.int64)
    shared = [mine.view(np.uint8), len(mine), natives.int64]
    yield from complete([comm.Iallreduce(natives.in_place, shared, natives.max)])
    latency, overhead, gap, fold = (1e-9 * each for each in mine.tolist())
    return NetworkConstants(latency, overhead, overhead, gap / _MIB, fold / _MIB)


def _rounds(comm: Any, byte: Any, nbytes: int, count: int) -> Coroutine[tuple[float, float]]:
    """Seconds of the calls that begin a message in each direction, and until both have ended: the medians."""
    rank, size = comm.Get_rank(), comm.Get_size()
    sent, received = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    called, ended = [], []
    for _ in range(count):
        start = time.perf_counter()
        receive = comm.Irecv([received, byte], (rank - 1) % size, _TAG)
        send = comm.Isend([sent, byte], (rank + 1) % size, _TAG)
        called.append(time.perf_counter() - start)
        yield from complete([receive, send])
        ended.append(time.perf_counter() - start)
    return statistics.median(called), statistics.median(ended)


def _fold() -> float:
    """Seconds per byte of an addition."""
    mine, other = (np.zeros(_FOLDED // 4, np.float32) for _ in range(2))
    mine += other  # Only now the system gives the memory
    start = time.perf_counter()
    mine += other
    return (time.perf_counter() - start) / _FOLDED
