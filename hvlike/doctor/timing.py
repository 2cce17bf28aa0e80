"""How long an allreduce takes on each way that the job has, and whether its result is right."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

import hvlike
from hvlike.collectives.context import current

SIZES = (4 << 10, 1 << 20, 16 << 20)
"""Bytes."""
_WARM = 3
_REPEATS = 7
_FLOAT_BYTES = 4
_HOST = torch.device("cpu")

Nodes = Sequence[Sequence[int]]


class Way(NamedTuple):
    """Some ranks, and the plane that reduces among them."""

    plane: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """The times of one size, in seconds."""

    nbytes: int
    median: float
    low: float
    high: float
    right: bool
    """Every element of every result was the sum."""


@dataclass(frozen=True)
class Timing:
    """The figures of one way, as its first rank saw them."""

    way: Way
    rows: tuple[Row, ...]
    reason: str = ""
    """Why it is this plane, where there was a choice."""


@dataclass(frozen=True)
class Timings:
    """All ways, and what a copy in memory takes."""

    timings: tuple[Timing, ...]
    copy: float
    """Seconds for a copy of the largest size on rank 0."""


def ways(nodes: Nodes) -> list[Way]:
    """The ways of a job of host memory. nodes: the ranks of each node.

    [[0, 1]]           shared [0 1]
    [[0], [1]]         network [0 1]
    [[0, 1], [2, 3]]   shared [0 1], network [0 2], hierarchical [0 1 2 3]
    """
    everybody = tuple(sorted(rank for node in nodes for rank in node))
    firsts = tuple(node[0] for node in nodes)
    if len(everybody) == 1:
        return []
    if len(nodes) == 1:
        return [Way("shared", everybody)]
    if firsts == everybody:
        return [Way("network", everybody)]
    inside = [Way("shared", tuple(nodes[0]))] if len(nodes[0]) > 1 else []
    return [*inside, Way("network", firsts), Way("hierarchical", everybody)]


def add_process_sets(plan: Sequence[Way]) -> list[hvlike.ProcessSet]:
    """The sets that these ways need: one for each that has not all ranks. Collective: every rank; blocks."""
    partial = (way for way in plan if len(way.ranks) < hvlike.size())
    return [hvlike.add_process_set(list(way.ranks)) for way in partial]


def own_gpu() -> torch.device | None:
    """A GPU of this rank, where every rank has one; else None. Collective: every rank; blocks."""
    count = torch.cuda.device_count()
    if not all(hvlike.allgather_object(count > 0)):
        return None
    device = torch.device("cuda", hvlike.local_rank() % count)
    torch.cuda.set_device(device)
    return device


def measure(plan: Sequence[Way], sets: Sequence[hvlike.ProcessSet], gpu: torch.device | None) -> Timings:
    """Time every way, one after the other. hvlike runs. Collective: every rank; blocks.

    gpu: where tensors of a GPU are reduced too; None: nowhere.
    """
    partial = iter(sets)
    timings = []
    for way in plan:
        chosen = hvlike.global_process_set if len(way.ranks) == hvlike.size() else next(partial)
        if hvlike.rank() in way.ranks:
            timings.append(Timing(way, tuple(_rows(way, chosen, _HOST))))
        hvlike.barrier()
    if gpu is not None and hvlike.size() > 1:
        everybody = Way("cuda", tuple(range(hvlike.size())))
        rows = tuple(_rows(everybody, hvlike.global_process_set, gpu))
        # Which plane it is was decided when the first tensor came.
        choice = current().membership(None, "doctor").executor.device_choice
        if choice is not None:
            timings.append(Timing(everybody._replace(plane=choice.plane), rows, choice.reason))
    return Timings(tuple(timings), _copy_seconds())


def _rows(way: Way, process_set: hvlike.ProcessSet, device: torch.device) -> Iterator[Row]:
    total = sum(rank + 1 for rank in way.ranks)
    for nbytes in SIZES:
        tensor = torch.empty(nbytes // _FLOAT_BYTES, device=device)
        seconds = []
        right = True
        for _ in range(_WARM + _REPEATS):
            tensor.fill_(hvlike.rank() + 1)
            _settle(device)
            hvlike.barrier(process_set=process_set)
            start = time.perf_counter()
            hvlike.allreduce_(tensor, op=hvlike.Sum, name=f"doctor.{way.plane}.{nbytes}", process_set=process_set)
            _settle(device)
            seconds.append(time.perf_counter() - start)
            right = right and bool((tensor == total).all())
        kept = seconds[_WARM:]
        yield Row(nbytes, statistics.median(kept), min(kept), max(kept), right)


def _settle(device: torch.device) -> None:
    """Wait for what was asked of a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _copy_seconds() -> float:
    source = torch.ones(SIZES[-1] // _FLOAT_BYTES, device=_HOST)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])
