"""Start the job step by step, as init() and a first reduction do; the records show how far it came.

A Case holds all facts that the checks judge: of each rank (RankFacts), of the job (Job), and of the launchers.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import hvlike
from hvlike.collectives.requests.message_table import name_ranks
from hvlike.collectives.session.context import current
from hvlike.config import SETTINGS
from hvlike.doctor.finding import Finding, by_value
from hvlike.doctor.gpus import Gpus, NcclState, collect_gpus, collect_nccl_state
from hvlike.doctor.launching import LaunchEnvironment, Launchers, Trial, collect_environment
from hvlike.doctor.machine import (
    SHM_FOLDER,
    Files,
    Processor,
    SharedMemory,
    collect_files,
    collect_processor,
    collect_shared_memory,
    mapped_by_hvlike,
)
from hvlike.doctor.model import Model
from hvlike.doctor.probe import Answers, Gap, Prober, known
from hvlike.doctor.software import Software, collect_software
from hvlike.doctor.timings import Timings, measure_ways, own_gpu, ways
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


_TIMING_LIMITS = 3.0


@dataclass(frozen=True)
class Gathered:
    """What rank 0 has received from all ranks; the tuples are empty elsewhere."""

    nodes: tuple[tuple[int, ...], ...]
    ranks: tuple[RankFacts, ...]
    wall_times: tuple[float, ...]  # Of all ranks at the same moment


@dataclass(frozen=True)
class Job:
    """How far the job came. A Gap: there it ended. None: not reached."""

    report: RankReport | Gap  # What MPI says of this rank
    gathered: Gathered | Gap | None
    running: tuple[str | None, ...] | Gap | None
    """How each rank shares memory with those of its node: "memfd", "/dev/shm", or None where it is alone."""
    timings: Timings | Gap | None
    end: Gap | None  # What went wrong at the very end


def start_job(own: RankFacts, prober: Prober) -> Job:
    """Start MPI and hvlike in a child, and reduce something. Collective: every rank of the job; blocks."""
    return read_job(
        prober.follow(lambda: _steps(own), lambda step: prober.limit * (_TIMING_LIMITS if step == 3 else 1))
    )


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
    wall_times = probe.gather(probe.wall_time()) or []
    yield Gathered(nodes, tuple(ranks), tuple(wall_times))
    hvlike.init()
    mine = mapped_by_hvlike() if hvlike.local_size() > 1 else None
    yield tuple(hvlike.allgather_object(mine))
    yield measure_ways(ways(current().world.nodes), own_gpu())
    hvlike.shutdown()
    probe.end()


@dataclass(frozen=True)
class Case:
    """What was found out, on one rank alone or on all."""

    ranks: tuple[RankFacts, ...]  # Of all ranks where they came together, else of this one
    job: Job
    launchers: Launchers | Gap | None  # None: not looked at
    trial: Trial | Gap | None  # None: not tried
    model: Model | Gap | None  # None: the user named none

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


def check_thread_level(case: Case) -> Finding:
    report = case.job.report
    if isinstance(report, Gap):
        return Finding.skip("MPI did not start")
    if report.thread_level == "THREAD_MULTIPLE":
        return Finding("MPI_THREAD_MULTIPLE")
    finding = Finding()
    finding.warn(
        f"MPI_{report.thread_level}: hvlike works with it, your own mpi4py calls beside it do not",
        "Unset HVLIKE_MPI_THREADS_DISABLE and what lowers it in mpi4py.rc, or build MPI with threads.",
    )
    return finding


def check_hosts(case: Case) -> Finding:
    if case.job.gathered is None:
        return Finding.skip("MPI did not start")
    nodes = known(case.job.gathered).nodes
    finding, names = Finding(), [case.host(node) for node in nodes]
    for name, node in zip(names, nodes, strict=True):
        local = f" (local ranks 0 to {len(node) - 1})" if len(node) > 1 else ""
        finding.note(f"{name}: {name_ranks(node)}{local}")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        finding.warn(
            f"ranks of {', '.join(twice)} do not share memory",
            "Containers of one host that do not see each other's memory count as nodes, which is slow: run all "
            "ranks of a host in one container, or with a common --ipc, --pid and /dev/shm.",
        )
    if len({len(node) for node in nodes}) > 1:
        finding.warn(
            "the nodes have different numbers of ranks",
            "It works, but one rank of each node crosses the network for all: use the same number on every host.",
        )
    return finding


def check_start(case: Case) -> Finding:
    job, launcher = case.job, case.me.environment.launcher
    if job.running is None:
        return Finding.skip("MPI did not come so far")
    refused = not isinstance(job.report, Gap) and launcher is not None and launcher.size > job.report.size == 1
    if isinstance(job.running, Gap) and refused:
        return Finding.skip("init() raises LaunchError here, as it should: see launcher")
    finding = Finding("init() and shutdown() work")
    for way, ranks in by_value(enumerate(known(job.running))):
        if way == SHM_FOLDER:
            finding.warn(
                f"{ranks} share memory through files in /dev/shm",
                "Memory without a name is refused: let the ranks see each other's processes (one PID namespace).",
            )
        else:
            finding.note(f"{ranks} share memory without a name" if way else f"{ranks}: nobody to share memory with")
    if job.end is not None:
        finding.fail(f"the end of the job {job.end.reason}", "Look for another rank that failed.")
    return finding
