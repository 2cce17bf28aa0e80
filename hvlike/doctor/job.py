"""Start the job step by step, as init() and a first reduction do; the records show how far it came.

A Case holds all facts that the checks judge: of each rank (RankFacts), of the job (Job), and of the launchers.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch

import hvlike
from hvlike.collectives.session.context import current
from hvlike.config import SETTINGS
from hvlike.doctor.gpu_facts import Gpus, NcclState, collect_gpus, collect_nccl_state
from hvlike.doctor.machine_facts import (
    Files,
    Model,
    Processor,
    SharedMemory,
    collect_files,
    collect_processor,
    collect_shared_memory,
    mapped_by_hvlike,
)
from hvlike.doctor.probe import Answers, Gap, Prober
from hvlike.doctor.software_facts import (
    LaunchEnvironment,
    Launchers,
    Software,
    Trial,
    collect_environment,
    collect_software,
)
from hvlike.transport.host.find_mpirun import MpiLibrary, ask_mpi_library
from hvlike.transport.host.launch_probe import LaunchProbe, RankReport


@dataclass(frozen=True)
class RankFacts:
    """What one rank has found out without MPI. A Gap: it could not."""

    host: str
    software: Software | Gap
    environment: LaunchEnvironment
    library: MpiLibrary | Gap
    processor: Processor | Gap
    memory: SharedMemory | Gap
    files: Files | Gap
    gpus: Gpus | Gap
    nccl: NcclState | Gap


def collect_rank_facts(prober: Prober) -> RankFacts:
    """Look at this process and its machine, every question in a process of its own. Local."""
    launcher = os.getppid()
    return RankFacts(
        host=socket.gethostname(),
        software=prober.ask(collect_software),
        environment=collect_environment(os.environ),
        library=prober.ask(lambda: ask_mpi_library(os.environ)),
        processor=prober.ask(lambda: collect_processor(launcher)),
        memory=prober.ask(collect_shared_memory),
        files=prober.ask(collect_files),
        gpus=prober.ask(collect_gpus),
        nccl=prober.ask(collect_nccl_state),
    )


SIZES = (4 << 10, 1 << 20, 16 << 20)
"""Bytes."""
_WARM = 3
_REPEATS = 7
_FLOAT_BYTES = 4
_HOST = torch.device("cpu")

Nodes = Sequence[Sequence[int]]


class Way(NamedTuple):
    """Some ranks, and the backend that reduces among them."""

    backend: str
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
    """Why it is this backend, where there was a choice."""


@dataclass(frozen=True)
class Timings:
    """All ways, and what a copy in memory takes."""

    timings: tuple[Timing, ...]
    copy: float
    """Seconds for a copy of the largest size on rank 0."""


def ways(nodes: Nodes) -> list[Way]:
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


def measure_ways(plan: Sequence[Way], sets: Sequence[hvlike.ProcessSet], gpu: torch.device | None) -> Timings:
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
        every_rank = Way("cuda", tuple(range(hvlike.size())))
        rows = tuple(_rows(every_rank, hvlike.global_process_set, gpu))
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
            _settle(device)
            hvlike.barrier(process_set=process_set)
            start = time.perf_counter()
            hvlike.allreduce_(tensor, op=hvlike.Sum, name=f"doctor.{way.backend}.{nbytes}", process_set=process_set)
            _settle(device)
            seconds.append(time.perf_counter() - start)
            right = right and bool((tensor == total).all())
        kept = seconds[_WARM:]
        yield Row(nbytes, statistics.median(kept), min(kept), max(kept), right)


def _settle(device: torch.device) -> None:
    """Wait until a GPU has done what was asked of it."""
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


_TIMING_LIMITS = 3.0


@dataclass(frozen=True)
class Gathered:
    """What rank 0 has received from all ranks; the tuples are empty elsewhere."""

    nodes: tuple[tuple[int, ...], ...]
    ranks: tuple[RankFacts, ...]
    reports: tuple[RankReport, ...]
    wall_times: tuple[float, ...]
    """Of all ranks at the same moment."""


@dataclass(frozen=True)
class Running:
    """hvlike after init()."""

    shares: tuple[str | None, ...]
    """How each rank shares memory with those of its node: "memfd", "/dev/shm", or None where it is alone."""


@dataclass(frozen=True)
class Job:
    """How far the job came. A Gap: there it ended. None: not reached."""

    report: RankReport | Gap
    """What MPI says of this rank."""
    gathered: Gathered | Gap | None
    running: Running | Gap | None
    timings: Timings | Gap | None
    end: Gap | None
    """What went wrong at the very end."""


def start_job(own: RankFacts, prober: Prober) -> Job:
    """Start MPI and hvlike in a child, and reduce something. Collective: every rank of the job; blocks."""
    factors = {3: _TIMING_LIMITS}
    return read_job(prober.follow(lambda: _steps(own), lambda step: prober.limit * factors.get(step, 1.0)))


def read_job(answers: Answers[Any]) -> Job:
    """Return the records, which come in the order of its fields, as a job."""
    report, gathered, running, timings, end = [*answers.records, answers.gap, None, None, None, None][:5]
    return Job(report, gathered, running, timings, end)


def _steps(own: RankFacts) -> Iterator[Any]:
    for name in SETTINGS["timeline"].spellings:
        # Do not overwrite a timeline of the user.
        os.environ.pop(name, None)
    probe = LaunchProbe()
    yield probe.place
    nodes = probe.connect()
    ranks = probe.gather(own) or []
    reports = probe.gather(probe.place) or []
    wall_times = probe.gather(probe.wall_time()) or []
    yield Gathered(nodes, tuple(ranks), tuple(reports), tuple(wall_times))
    hvlike.init()
    plan = ways(current().world.nodes)
    sets = add_process_sets(plan)
    mine = mapped_by_hvlike() if hvlike.local_size() > 1 else None
    yield Running(tuple(hvlike.allgather_object(mine)))
    yield measure_ways(plan, sets, own_gpu())
    hvlike.shutdown()
    probe.end()


T = TypeVar("T")


class Unanswered(Exception):
    """A check needs what could not be found out."""

    def __init__(self, gap: Gap) -> None:
        super().__init__(gap.reason)
        self.gap = gap


def known(value: T | Gap) -> T:
    """Return the answer. Raises: Unanswered when there is none; the runner then says why."""
    if isinstance(value, Gap):
        raise Unanswered(value)
    return value


@dataclass(frozen=True)
class Case:
    """What was found out, on one rank alone or on all."""

    ranks: tuple[RankFacts, ...]
    """Of all ranks where they came together, else of this one."""
    job: Job
    launchers: Launchers | Gap | None
    """None: not looked at."""
    trial: Trial | Gap | None
    """None: not tried."""
    model: Model | Gap | None
    """None: the user named none."""

    @property
    def me(self) -> RankFacts:
        """The first of the ranks."""
        return self.ranks[0]

    @property
    def unmet(self) -> int:
        """How many ranks the launcher was asked for if they did not come together; else 0."""
        launcher = self.me.environment.launcher
        asked = 0 if launcher is None else launcher.size
        return asked if asked > len(self.ranks) else 0

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node; this rank alone where they did not come together."""
        gathered = self.job.gathered
        return ((0,),) if gathered is None or isinstance(gathered, Gap) else gathered.nodes
