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
from hvlike.doctor.finding import Finding, by_value
from hvlike.doctor.gpus import Gpus, NcclState, collect_gpus, collect_nccl_state
from hvlike.doctor.launching import Settings, collect_settings
from hvlike.doctor.probe import Gap, Prober, Skipped, known
from hvlike.doctor.software import Software, collect_software
from hvlike.launch.trial import Launchers, Trial
from hvlike.observe.printing import format_seconds, format_size
from hvlike.transport.host.find_mpirun import MpiLibrary, ask_mpi_library
from hvlike.transport.host.launchers import Launcher, detect_launcher
from hvlike.transport.host.mpi_library import SHM_FOLDER, load_mpi
from hvlike.transport.host.numa import Place, place_of_process
from hvlike.transport.host.surroundings import Oddity, look_around
from hvlike.transport.host.topology import group_by_node
from hvlike.version import page

SIZES = (4 << 10, 4 << 20)  # Bytes
_WARM, _REPEATS = 3, 7
_SLOW_NETWORK = 100e6  # Bytes a second: less than a gigabit network
_THREAD_LEVELS = ("THREAD_SINGLE", "THREAD_FUNNELED", "THREAD_SERIALIZED", "THREAD_MULTIPLE")
_ONE_CONTAINER = (
    "Containers that do not see each other's memory count as nodes, which is slow: run all ranks of a host in one "
    "container, or with a common --ipc, --pid and /dev/shm."
)
_ONE_NAMESPACE = (
    "Memory without a name is refused: let the ranks see each other's processes (one PID namespace; with Apptainer "
    "`exec --sharens`)."
)


@dataclass(frozen=True)
class RankFacts:
    """What one rank has found out without MPI. A Gap: it could not."""

    host: str
    launcher: Launcher | None
    settings: Settings
    software: Software | Gap
    library: MpiLibrary | Gap
    processor: machine.Processor | Gap
    memory: machine.SharedMemory | Gap
    files: machine.TemporaryFiles | Gap
    gpus: Gpus | Gap
    nccl: NcclState | Gap
    surroundings: tuple[Oddity, ...] | Gap = ()


def collect_rank_facts(prober: Prober) -> RankFacts:
    """Look at this process and its machine, every question in a process of its own. Local."""
    parent = os.getppid()
    gpus = prober.ask(collect_gpus)
    has_gpus = isinstance(gpus, Gap) or gpus.has_driver
    return RankFacts(
        host=socket.gethostname(),
        launcher=detect_launcher(os.environ),
        settings=collect_settings(os.environ),
        software=prober.ask(collect_software),
        library=prober.ask(lambda: ask_mpi_library(os.environ)),
        processor=prober.ask(lambda: machine.collect_processor(parent)),
        memory=prober.ask(machine.collect_shared_memory),
        files=prober.ask(machine.collect_temporary_files),
        gpus=gpus,
        nccl=prober.ask(collect_nccl_state),
        surroundings=prober.ask(lambda: look_around(os.environ, gpus=has_gpus)),
    )


class RankReport(NamedTuple):
    """What MPI says of this rank."""

    size: int
    thread_level: str  # MPI's name of it, as THREAD_MULTIPLE


class Gathered(NamedTuple):
    """What rank 0 has received from all ranks."""

    nodes: tuple[tuple[int, ...], ...]
    ranks: tuple[RankFacts, ...]  # Empty on the other ranks


class Timing(NamedTuple):
    """An allreduce over all ranks, as rank 0 saw it."""

    where: str  # "host memory" or "GPU"
    nbytes: int
    seconds: float  # The median
    right: bool  # Every element of every result was the sum


class Timings(NamedTuple):
    timings: tuple[Timing, ...]  # Empty where one rank is alone
    device: str | None  # Which backend reduces on GPUs, and why; None: not every rank has one


@dataclass(frozen=True)
class JobProgress:
    """How far the job came, in the order of its steps. A Gap: there it ended. None: not reached."""

    report: RankReport | Gap
    gathered: Gathered | Gap | None = None
    running: tuple[str | None, ...] | Gap | None = None  # How ranks share memory: "memfd", "/dev/shm"; None: not
    timings: Timings | Gap | None = None
    places: tuple[Place, ...] | Gap | None = None  # Of all ranks
    end: Gap | None = None


def start_job(own: RankFacts, prober: Prober) -> JobProgress:
    """Start MPI and hvlike in a child, and reduce something. Collective: every rank of the job; blocks."""
    records, gap = prober.follow(lambda: _steps(own))
    return JobProgress(*[*records, gap])


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
    yield Gathered(nodes, tuple(comm.gather(own) or ()))
    hvlike.init()
    mine = machine.mapped_by_hvlike() if hvlike.local_size() > 1 else None
    yield tuple(hvlike.allgather_object(mine))
    yield measure_allreduce()
    # Now the ranks have touched what they share.
    yield tuple(hvlike.allgather_object(place_of_process()))
    hvlike.shutdown()
    comm.Free()
    mpi.Finalize()


def measure_allreduce() -> Timings:
    """Reduce tensors over all ranks; those of GPUs, too, if every rank has one. Collective: every rank; blocks."""
    if hvlike.size() == 1:
        return Timings((), None)
    places = {"host memory": torch.device("cpu")}
    if all(hvlike.allgather_object(torch.cuda.device_count() > 0)):
        places["GPU"] = hvlike.pin_device()
    timings = tuple(_time_allreduce(where, nbytes, device) for where, device in places.items() for nbytes in SIZES)
    # Which backend it is was decided when the first tensor of a GPU came.
    choice = current().find_set(None, "doctor").executor.site.device_choice
    return Timings(timings, None if choice is None else f"{choice.backend}: {choice.reason}")


def _time_allreduce(where: str, nbytes: int, device: torch.device) -> Timing:
    total = hvlike.size() * (hvlike.size() + 1) // 2
    tensor = torch.empty(nbytes // torch.float32.itemsize, device=device)
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
        asked = 0 if self.me.launcher is None else self.me.launcher.size
        return asked if asked > len(self.ranks) else 0

    def host(self, node: Sequence[int]) -> str:
        return self.ranks[node[0]].host

    def places(self, node: Sequence[int]) -> dict[int, Place]:
        """Return where the ranks of a node lie in the end; without memory where the job did not come so far."""
        found = self.job.places
        if isinstance(found, tuple):
            return {rank: found[rank] for rank in node}
        return {rank: Place(known(self.ranks[rank].processor).allowed) for rank in node}

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node; this rank alone where they did not come together."""
        return self.job.gathered.nodes if isinstance(self.job.gathered, Gathered) else ((0,),)


def check_hosts(case: Case, finding: Finding) -> None:
    hosts: set[str] = set()
    for node in known(case.job.gathered).nodes:
        host = case.host(node)
        finding.note(f"{host}: {name_ranks(node)}")
        if host in hosts:
            finding.warn(f"ranks of {host} do not share memory", _ONE_CONTAINER)
        hosts.add(host)


def check_start(case: Case, finding: Finding) -> None:
    job, launcher = case.job, case.me.launcher
    alone = isinstance(job.report, RankReport) and job.report.size == 1
    if isinstance(job.running, Gap) and alone and launcher is not None and launcher.size > 1:
        raise Skipped("init() raises LaunchError here, as it should: see launcher")
    for way, ranks in by_value(enumerate(known(job.running))):
        if way == SHM_FOLDER:
            finding.warn(f"{ranks} share memory through files in /dev/shm", _ONE_NAMESPACE)
        else:
            finding.note(f"{ranks} share memory without a name" if way else f"{ranks}: nobody to share memory with")
    if job.end is not None:
        finding.fail(f"the end of the job {job.end.reason}", "Look for another rank that failed.")


def check_allreduce(case: Case, finding: Finding) -> None:
    timings, device = known(case.job.timings)
    if not timings:
        raise Skipped("one rank has nobody to reduce with: mpirun -n 2 python -m hvlike doctor")
    for timing in timings:
        finding.note(f"{timing.where}, {format_size(timing.nbytes)}: {format_seconds(timing.seconds)}")
    if device is not None:
        finding.note(device)
    if not all(timing.right for timing in timings):
        finding.fail("a sum was WRONG", "Do not train on this machine. Please report it, with the whole of this text.")
    large = timings[len(SIZES) - 1]
    rate = large.nbytes / large.seconds
    if len(case.nodes) > 1 and rate < _SLOW_NETWORK:
        text = f"{rate / 1e6:.0f} MB/s between the nodes"
        finding.warn(text, f"Is this the network you mean? Name it: {page('several-nodes')}.")
