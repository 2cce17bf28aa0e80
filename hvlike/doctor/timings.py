"""Time the backends that reduce in this job, and judge the times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

import hvlike
from hvlike.bench.harness.benchmark import settle
from hvlike.bench.harness.comparison import timed
from hvlike.bench.harness.report import format_seconds
from hvlike.collectives.session.context import current
from hvlike.doctor.finding import Finding, in_bytes
from hvlike.doctor.probe import known

if TYPE_CHECKING:
    from hvlike.doctor.job import Case

SIZES = (4 << 10, 1 << 20, 16 << 20)  # Bytes
_WARM, _REPEATS = 3, 7
_FLOAT_BYTES = 4
_SLOWER_THAN_A_COPY = 40  # A reduction inside a node that takes so many times as long as a copy is not as it should be
_SLOW_NETWORK = 100e6  # Bytes a second: less than a gigabit network
_SLOW_SMALL = 5e-3  # Seconds for a reduction of some KiB inside a node


class Way(NamedTuple):
    """Some ranks, and the backend that reduces among them."""

    backend: str
    ranks: tuple[int, ...]


class Row(NamedTuple):
    """The times of one size, in seconds."""

    nbytes: int
    median: float
    low: float
    high: float
    right: bool  # Every element of every result was the sum


class Timing(NamedTuple):
    """The figures of one way, as its first rank saw them."""

    way: Way
    rows: tuple[Row, ...]
    reason: str = ""  # Why it is this backend, where there was a choice


class Timings(NamedTuple):
    """All ways, and the seconds of a copy of the largest size in memory on rank 0."""

    timings: tuple[Timing, ...]
    copy: float


def ways(nodes: Sequence[Sequence[int]]) -> list[Way]:
    """Return the ways to reduce host memory in a job. nodes: the ranks of each node.

    [[0, 1]]           shared [0 1]
    [[0], [1]]         network [0 1]
    [[0, 1], [2, 3]]   shared [0 1], network [0 2], hierarchical [0 1 2 3]
    """
    every_rank = tuple(sorted(rank for node in nodes for rank in node))
    firsts = tuple(node[0] for node in nodes)
    if len(every_rank) == 1:
        return []
    if len(nodes) == 1:
        return [Way("shared", every_rank)]
    if firsts == every_rank:
        return [Way("network", every_rank)]
    inside = [Way("shared", tuple(nodes[0]))] if len(nodes[0]) > 1 else []
    return [*inside, Way("network", firsts), Way("hierarchical", every_rank)]


def own_gpu() -> torch.device | None:
    """A GPU of this rank, where every rank has one; else None. Collective: every rank; blocks."""
    count = torch.cuda.device_count()
    if not all(hvlike.allgather_object(count > 0)):
        return None
    device = torch.device("cuda", hvlike.local_rank() % count)
    torch.cuda.set_device(device)
    return device


def measure_ways(plan: Sequence[Way], gpu: torch.device | None) -> Timings:
    """Time every way, one after the other. hvlike runs. Collective: every rank; blocks.

    gpu: where tensors of a GPU are reduced too; None: nowhere.
    """
    everybody = hvlike.global_process_set
    timings = []
    for way in plan:
        chosen = everybody if len(way.ranks) == hvlike.size() else hvlike.add_process_set(list(way.ranks))
        if hvlike.rank() in way.ranks:
            timings.append(Timing(way, tuple(_rows(way, chosen, torch.device("cpu")))))
        hvlike.barrier()
    if gpu is not None and hvlike.size() > 1:
        every_rank = Way("cuda", tuple(range(hvlike.size())))
        rows = tuple(_rows(every_rank, everybody, gpu))
        # Which backend it is was decided when the first tensor came.
        choice = current().find_set(None, "doctor").executor.device_choice
        if choice is not None:
            timings.append(Timing(every_rank._replace(backend=choice.backend), rows, choice.reason))
    return Timings(tuple(timings), _copy_seconds())


def _rows(way: Way, process_set: hvlike.ProcessSet, device: torch.device) -> Iterator[Row]:
    total = sum(rank + 1 for rank in way.ranks)
    for nbytes in SIZES:
        tensor = torch.empty(nbytes // _FLOAT_BYTES, device=device)
        seconds = []
        right = True
        for _ in range(_WARM + _REPEATS):
            tensor.fill_(hvlike.rank() + 1)
            settle(device)
            hvlike.barrier(process_set=process_set)
            start = time.perf_counter()
            hvlike.allreduce_(tensor, op=hvlike.Sum, name=f"doctor.{way.backend}.{nbytes}", process_set=process_set)
            settle(device)
            seconds.append(time.perf_counter() - start)
            right = right and bool((tensor == total).all())
        kept = seconds[_WARM:]
        yield Row(nbytes, statistics.median(kept), min(kept), max(kept), right)


def _copy_seconds() -> float:
    source = torch.ones(SIZES[-1] // _FLOAT_BYTES)
    target = torch.empty_like(source)
    return statistics.median(timed(lambda: target.copy_(source), _REPEATS)[1:])


def check_allreduce(case: Case) -> Finding:
    if case.job.timings is None:
        return Finding.skip("hvlike did not start")
    timings = known(case.job.timings)
    if not timings.timings:
        return Finding.skip("one rank has nobody to reduce with: mpirun -n 2 python -m hvlike doctor")
    finding = Finding()
    for timing in timings.timings:
        name, ranks = timing.way.backend, len(timing.way.ranks)
        for row in timing.rows:
            median, low, high = map(format_seconds, row[1:4])
            finding.note(f"{name}, {ranks} ranks, {in_bytes(row.nbytes)}: {median} [{low} to {high}]")
        if timing.reason:
            finding.note(f"{name}: {timing.reason}")
        _check_times(finding, timing, timings.copy)
    largest = timings.timings[0].rows[-1].nbytes
    finding.note(f"a copy of {in_bytes(largest)} in memory: {format_seconds(timings.copy)}")
    return finding


def _check_times(finding: Finding, timing: Timing, copy: float) -> None:
    name, small, large = timing.way.backend, timing.rows[0], timing.rows[-1]
    if not all(row.right for row in timing.rows):
        advice = "Do not train on this machine. Please report it, with the whole of this text."
        finding.fail(f"{name}: a sum was WRONG", advice)
    if name == "shared":
        if large.median > _SLOWER_THAN_A_COPY * copy:
            text = f"{name}: {large.median / copy:.0f} times as long as a copy"
            finding.warn(text, "The ranks take turns on the cores, or others use them: see cores and threads.")
        if small.median > _SLOW_SMALL:
            text = f"{name}: {format_seconds(small.median)} for {in_bytes(small.nbytes)}"
            finding.warn(text, "Ranks wake each other late: see cores and threads.")
    elif name in ("network", "hierarchical") and large.nbytes / large.median < _SLOW_NETWORK:
        text = f"{name}: {large.nbytes / large.median / 1e6:.0f} MB/s"
        finding.warn(text, "Is this the network you mean? Name it: docs/several-nodes.md.")
