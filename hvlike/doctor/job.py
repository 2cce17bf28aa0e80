"""Start the job step by step, as init() and a first reduction do; the records show how far it came.

A Case holds all facts that the checks judge: of each rank (RankFacts), of the job (JobProgress), and of the launchers.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

import hvlike
from hvlike.bench.harness.benchmark import settle
from hvlike.bench.harness.comparison import timed
from hvlike.bench.harness.report import format_seconds, format_size
from hvlike.collectives.requests.message_table import name_ranks
from hvlike.collectives.session.context import current
from hvlike.config import SETTINGS
from hvlike.doctor import machine
from hvlike.doctor.finding import Finding, Skipped, by_value
from hvlike.doctor.gpus import Gpus, NcclState, collect_gpus, collect_nccl_state
from hvlike.doctor.launching import LaunchEnvironment, Launchers, Trial, collect_environment
from hvlike.doctor.probe import Answers, Gap, Prober, known
from hvlike.doctor.software import Software, collect_software
from hvlike.transport.host.find_mpirun import MpiLibrary, ask_mpi_library
from hvlike.transport.host.mpi_library import load_mpi
from hvlike.transport.host.topology import group_by_node
from hvlike.version import page

SIZES = (4 << 10, 1 << 20, 16 << 20)  # Bytes
_WARM, _REPEATS = 3, 7
_FLOAT_BYTES = 4
_SLOWER_THAN_A_COPY = 40  # A reduction inside a node that takes so many times as long as a copy is not as it should be
_SLOW_NETWORK = 100e6  # Bytes a second: less than a gigabit network
_SLOW_SMALL = 5e-3  # Seconds for a reduction of some KiB inside a node
_TIMING_LIMITS = 3.0
_THREAD_LEVELS = ("THREAD_SINGLE", "THREAD_FUNNELED", "THREAD_SERIALIZED", "THREAD_MULTIPLE")


@dataclass(frozen=True)
class RankFacts:
    """What one rank has found out without MPI. A Gap: it could not."""

    host: str
    software: Software | Gap
    environment: LaunchEnvironment
    library: MpiLibrary | Gap
    processor: machine.Processor | Gap
    memory: machine.SharedMemory | Gap
    files: machine.Files | Gap
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
        processor=prober.ask(lambda: machine.collect_processor(launcher)),
        memory=prober.ask(machine.collect_shared_memory),
        files=prober.ask(machine.collect_files),
        gpus=prober.ask(collect_gpus),
        nccl=prober.ask(collect_nccl_state),
    )


class TimedWay(NamedTuple):
    backend: str
    ranks: tuple[int, ...]  # Among which it reduces


class Row(NamedTuple):  # In seconds
    nbytes: int
    median: float
    low: float
    high: float
    right: bool  # Every element of every result was the sum


class Timing(NamedTuple):
    way: TimedWay
    rows: tuple[Row, ...]  # As its first rank saw them
    reason: str = ""  # Why it is this backend, where there was a choice


class Timings(NamedTuple):
    timings: tuple[Timing, ...]
    copy: float  # Seconds for the largest size in memory on rank 0


def ways(nodes: Sequence[Sequence[int]]) -> list[TimedWay]:
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
        return [TimedWay("shared", every_rank)]
    if firsts == every_rank:
        return [TimedWay("network", every_rank)]
    inside = [TimedWay("shared", tuple(nodes[0]))] if len(nodes[0]) > 1 else []
    return [*inside, TimedWay("network", firsts), TimedWay("hierarchical", every_rank)]


def own_gpu() -> torch.device | None:
    """A GPU of this rank, where every rank has one; else None. Collective: every rank; blocks."""
    every_rank_has_one = all(hvlike.allgather_object(torch.cuda.device_count() > 0))
    return hvlike.pin_device() if every_rank_has_one else None


def measure_ways(plan: Sequence[TimedWay], gpu: torch.device | None) -> Timings:
    """Time every way, one after the other; tensors of the GPU, too, if there is one. Collective: every rank; blocks."""
    everybody = hvlike.global_process_set
    timings = []
    for way in plan:
        chosen = everybody if len(way.ranks) == hvlike.size() else hvlike.add_process_set(list(way.ranks))
        if hvlike.rank() in way.ranks:
            timings.append(Timing(way, tuple(_rows(way, chosen, torch.device("cpu")))))
        hvlike.barrier()
    if gpu is not None and hvlike.size() > 1:
        every_rank = TimedWay("cuda", tuple(range(hvlike.size())))
        rows = tuple(_rows(every_rank, everybody, gpu))
        # Which backend it is was decided when the first tensor came.
        choice = current().find_set(None, "doctor").executor.site.device_choice
        if choice is not None:
            timings.append(Timing(every_rank._replace(backend=choice.backend), rows, choice.reason))
    source, target = torch.ones(SIZES[-1] // _FLOAT_BYTES), torch.empty(SIZES[-1] // _FLOAT_BYTES)
    copies = timed(lambda: target.copy_(source), _REPEATS)
    return Timings(tuple(timings), statistics.median(copies[1:]))


def _rows(way: TimedWay, process_set: hvlike.ProcessSet, device: torch.device) -> Iterator[Row]:
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


@dataclass(frozen=True)
class Gathered:
    """What rank 0 has received from all ranks; the tuples are empty elsewhere."""

    nodes: tuple[tuple[int, ...], ...]
    ranks: tuple[RankFacts, ...]
    wall_times: tuple[float, ...]  # Of all ranks at the same moment


class RankReport(NamedTuple):
    size: int
    thread_level: str  # MPI's name of it, as THREAD_MULTIPLE


@dataclass(frozen=True)
class JobProgress:
    """How far the job came. A Gap: there it ended. None: not reached."""

    report: RankReport | Gap  # What MPI says of this rank
    gathered: Gathered | Gap | None
    running: tuple[str | None, ...] | Gap | None  # How ranks share memory: "memfd", "/dev/shm"; None: one is alone
    timings: Timings | Gap | None
    end: Gap | None  # What went wrong at the very end


def start_job(own: RankFacts, prober: Prober) -> JobProgress:
    """Start MPI and hvlike in a child, and reduce something. Collective: every rank of the job; blocks."""
    limits = (1.0, 1.0, 1.0, _TIMING_LIMITS, 1.0)
    return read_job(prober.follow(lambda: _steps(own), lambda step: prober.limit * limits[step]))


def read_job(answers: Answers[Any]) -> JobProgress:
    # The records come in the order of its fields.
    report, gathered, running, timings, end = [*answers.records, answers.gap, None, None, None, None][:5]
    return JobProgress(report, gathered, running, timings, end)


def _steps(own: RankFacts) -> Iterator[Any]:
    for name in SETTINGS["timeline"].spellings:
        # Do not overwrite a timeline of the user.
        os.environ.pop(name, None)
    mpi = load_mpi()
    names = {getattr(mpi, name): name for name in _THREAD_LEVELS}
    yield RankReport(mpi.COMM_WORLD.Get_size(), names[mpi.Query_thread()])
    # Here come the first messages between the ranks.
    comm = mpi.COMM_WORLD.Dup()
    node = comm.Split_type(mpi.COMM_TYPE_SHARED, key=comm.Get_rank())
    nodes = group_by_node(comm.allgather(node.bcast(comm.Get_rank())))
    node.Free()
    ranks = comm.gather(own) or ()
    comm.Barrier()
    wall_times = comm.gather(time.time()) or ()
    yield Gathered(nodes, tuple(ranks), tuple(wall_times))
    hvlike.init()
    mine = machine.mapped_by_hvlike() if hvlike.local_size() > 1 else None
    yield tuple(hvlike.allgather_object(mine))
    yield measure_ways(ways(current().world.nodes), own_gpu())
    hvlike.shutdown()
    comm.Free()
    mpi.Finalize()


@dataclass(frozen=True)
class Case:
    """What was found out, on one rank alone or on all."""

    ranks: tuple[RankFacts, ...]  # Of all ranks where they came together, else of this one
    job: JobProgress
    launchers: Launchers | Gap | None  # None: not looked at
    trial: Trial | Gap | None  # None: not tried
    loss: Trial | Gap | None  # What a job did that has lost a rank; None: not tried
    model: machine.Model | Gap | None  # None: the user named none

    @property
    def me(self) -> RankFacts:
        return self.ranks[0]

    @property
    def unmet(self) -> int:
        """How many ranks the launcher was asked for if they did not come together; else 0."""
        launcher = self.me.environment.launcher
        asked = 0 if launcher is None else launcher.size
        return asked if asked > len(self.ranks) else 0

    def host(self, node: Sequence[int]) -> str:
        return self.ranks[node[0]].host

    @property
    def gathered(self) -> Gathered | None:
        """What the ranks have told rank 0; None where they did not come together."""
        return None if isinstance(self.job.gathered, Gap) else self.job.gathered

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node; this rank alone where they did not come together."""
        return ((0,),) if self.gathered is None else self.gathered.nodes


def check_thread_level(case: Case, finding: Finding) -> None:
    report = case.job.report
    if isinstance(report, Gap):
        raise Skipped("MPI did not start")
    if report.thread_level == "THREAD_MULTIPLE":
        finding.note("MPI_THREAD_MULTIPLE")
    else:
        text = f"MPI_{report.thread_level}: hvlike works with it, your own mpi4py calls beside it do not"
        advice = "Unset HVLIKE_MPI_THREADS_DISABLE and what lowers it in mpi4py.rc, or build MPI with threads."
        finding.warn(text, advice)


def check_hosts(case: Case, finding: Finding) -> None:
    if case.job.gathered is None:
        raise Skipped("MPI did not start")
    nodes = known(case.job.gathered).nodes
    names = [case.host(node) for node in nodes]
    for name, node in zip(names, nodes, strict=True):
        local = f" (local ranks 0 to {len(node) - 1})" if len(node) > 1 else ""
        finding.note(f"{name}: {name_ranks(node)}{local}")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        advice = (
            "Containers of one host that do not see each other's memory count as nodes, which is slow: run all ranks "
            "of a host in one container, or with a common --ipc, --pid and /dev/shm."
        )
        finding.warn(f"ranks of {', '.join(twice)} do not share memory", advice)
    if len({len(node) for node in nodes}) > 1:
        advice = "It works, but one rank of each node crosses the network for all: use the same number on every host."
        finding.warn("the nodes have different numbers of ranks", advice)


def check_start(case: Case, finding: Finding) -> None:
    job, launcher = case.job, case.me.environment.launcher
    if job.running is None:
        raise Skipped("MPI did not come so far")
    refused = not isinstance(job.report, Gap) and launcher is not None and launcher.size > job.report.size == 1
    if isinstance(job.running, Gap) and refused:
        raise Skipped("init() raises LaunchError here, as it should: see launcher")
    finding.note("init() and shutdown() work")
    for way, ranks in by_value(enumerate(known(job.running))):
        if way == machine.SHM_FOLDER:
            advice = (
                "Memory without a name is refused: let the ranks see each other's processes (one PID namespace; with "
                "Apptainer `exec --sharens`)."
            )
            finding.warn(f"{ranks} share memory through files in /dev/shm", advice)
        else:
            finding.note(f"{ranks} share memory without a name" if way else f"{ranks}: nobody to share memory with")
    if job.end is not None:
        finding.fail(f"the end of the job {job.end.reason}", "Look for another rank that failed.")


def check_allreduce(case: Case, finding: Finding) -> None:
    if case.job.timings is None:
        raise Skipped("hvlike did not start")
    timings = known(case.job.timings)
    if not timings.timings:
        raise Skipped("one rank has nobody to reduce with: mpirun -n 2 python -m hvlike doctor")
    for timing in timings.timings:
        name, ranks = timing.way.backend, len(timing.way.ranks)
        for row in timing.rows:
            median, low, high = map(format_seconds, row[1:4])
            finding.note(f"{name}, {ranks} ranks, {format_size(row.nbytes)}: {median} [{low} to {high}]")
        if timing.reason:
            finding.note(f"{name}: {timing.reason}")
        _check_times(finding, timing, timings.copy)
    largest = timings.timings[0].rows[-1].nbytes
    finding.note(f"a copy of {format_size(largest)} in memory: {format_seconds(timings.copy)}")


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
            text = f"{name}: {format_seconds(small.median)} for {format_size(small.nbytes)}"
            finding.warn(text, "Ranks wake each other late: see cores and threads.")
    elif name in ("network", "hierarchical") and large.nbytes / large.median < _SLOW_NETWORK:
        text = f"{name}: {large.nbytes / large.median / 1e6:.0f} MB/s"
        finding.warn(text, f"Is this the network you mean? Name it: {page('several-nodes')}.")
