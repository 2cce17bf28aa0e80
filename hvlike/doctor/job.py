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
from hvlike.collectives.requests.message_table import name_ranks
from hvlike.collectives.session.context import current
from hvlike.config import SETTINGS
from hvlike.doctor import machine
from hvlike.doctor.finding import Finding, Skipped, by_value
from hvlike.doctor.gpus import Gpus, NcclState, collect_gpus, collect_nccl_state
from hvlike.doctor.launching import LaunchEnvironment, Launchers, Trial, collect_environment
from hvlike.doctor.probe import Answers, Gap, Prober, known
from hvlike.doctor.software import Software, collect_software
from hvlike.observe.printing import format_seconds, format_size
from hvlike.transport.host.find_mpirun import MpiLibrary, ask_mpi_library
from hvlike.transport.host.mpi_library import load_mpi
from hvlike.transport.host.topology import group_by_node
from hvlike.version import page

SIZES = (4 << 10, 16 << 20)  # Bytes
_WARM, _REPEATS = 3, 7
_FLOAT_BYTES = 4
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
    files: machine.TemporaryFiles | Gap
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
        files=prober.ask(machine.collect_temporary_files),
        gpus=prober.ask(collect_gpus),
        nccl=prober.ask(collect_nccl_state),
    )


class Timing(NamedTuple):
    """An allreduce over all ranks, as rank 0 saw it."""

    where: str  # "host memory" or "GPU"
    nbytes: int
    seconds: float  # The median
    right: bool  # Every element of every result was the sum


class Timings(NamedTuple):
    timings: tuple[Timing, ...]
    device: str | None  # Which backend reduces on GPUs, and why; None: not every rank has one


def measure_allreduce() -> Timings:
    """Reduce tensors over all ranks; those of GPUs, too, if every rank has one. Collective: every rank; blocks."""
    if hvlike.size() == 1:
        return Timings((), None)
    timings = [_time_allreduce("host memory", nbytes, torch.device("cpu")) for nbytes in SIZES]
    if not all(hvlike.allgather_object(torch.cuda.device_count() > 0)):
        return Timings(tuple(timings), None)
    device = hvlike.pin_device()
    timings += [_time_allreduce("GPU", nbytes, device) for nbytes in SIZES]
    # Which backend it is was decided when the first tensor came.
    choice = current().find_set(None, "doctor").executor.site.device_choice
    return Timings(tuple(timings), None if choice is None else f"{choice.backend}: {choice.reason}")


def _time_allreduce(where: str, nbytes: int, device: torch.device) -> Timing:
    total = hvlike.size() * (hvlike.size() + 1) // 2
    tensor = torch.empty(nbytes // _FLOAT_BYTES, device=device)
    seconds = []
    right = True
    for _ in range(_WARM + _REPEATS):
        tensor.fill_(hvlike.rank() + 1)
        hvlike.barrier()
        start = time.perf_counter()
        hvlike.allreduce_(tensor, op=hvlike.Sum, name=f"doctor.{where}.{nbytes}")
        # To read an element waits for a GPU.
        float(tensor[0])
        seconds.append(time.perf_counter() - start)
        right = right and bool((tensor == total).all())
    return Timing(where, nbytes, statistics.median(seconds[_WARM:]), right)


@dataclass(frozen=True)
class Gathered:
    """What rank 0 has received from all ranks; the tuples are empty elsewhere."""

    nodes: tuple[tuple[int, ...], ...]
    ranks: tuple[RankFacts, ...]


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
    yield Gathered(nodes, tuple(ranks))
    hvlike.init()
    mine = machine.mapped_by_hvlike() if hvlike.local_size() > 1 else None
    yield tuple(hvlike.allgather_object(mine))
    yield measure_allreduce()
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
    found = known(case.job.timings)
    if not found.timings:
        raise Skipped("one rank has nobody to reduce with: mpirun -n 2 python -m hvlike doctor")
    finding.note(
        *(f"{each.where}, {format_size(each.nbytes)}: {format_seconds(each.seconds)}" for each in found.timings)
    )
    if found.device is not None:
        finding.note(found.device)
    if not all(each.right for each in found.timings):
        finding.fail("a sum was WRONG", "Do not train on this machine. Please report it, with the whole of this text.")
    small, large = found.timings[0], found.timings[len(SIZES) - 1]
    if len(case.nodes) > 1 and large.nbytes / large.seconds < _SLOW_NETWORK:
        text = f"{large.nbytes / large.seconds / 1e6:.0f} MB/s between the nodes"
        finding.warn(text, f"Is this the network you mean? Name it: {page('several-nodes')}.")
    elif len(case.nodes) == 1 and small.seconds > _SLOW_SMALL:
        text = f"{format_seconds(small.seconds)} for {format_size(small.nbytes)} inside a node"
        finding.warn(text, "Ranks wake each other late: see cores and threads.")
