"""Cores, NUMA domains, shared memory and temporary files of a machine, and the checks of them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hvlike.collectives.requests.message_table import name_ranks
from hvlike.doctor.finding import Finding, plural
from hvlike.doctor.probe import Gap, Skipped, known
from hvlike.observe.printing import format_size
from hvlike.system.system import system
from hvlike.transport.host import numa, topology
from hvlike.transport.host.mpi_library import SHM_FOLDER

if TYPE_CHECKING:
    from hvlike.doctor.job import Case

_BIND = (
    "Let the ranks use them: `mpirun --bind-to none` (Open MPI), `mpiexec -bind-to none` (MPICH), `srun "
    "--cpu-bind=none` or `--cpus-per-task=N`. Where a node has several NUMA domains, see places."
)
_MPI_BINDS = "MPI binds ranks itself: switch it off (Intel MPI: I_MPI_PIN=0; Cray: see MPICH_OFI_NIC_POLICY)."
# Room that Open MPI 5 wants to see in /dev/shm when a rank makes its segment; without it, it aborts or takes TCP.
_OPEN_MPI_BYTES = 16 << 20
_MPICH_BYTES_A_RANK = 1 << 20
_SMALL_SHM = 64 << 20
_MORE_SHM = "Give it more room: `docker run --shm-size=1g`, in Kubernetes an emptyDir of medium Memory on /dev/shm."
_NETWORK_KINDS = ("nfs", "nfs4", "lustre", "gpfs", "cifs", "smb3", "beegfs", "ceph", "fuse.sshfs", "9p", "afs")
_LONG_PATH = 80  # Characters. The path of a socket, which is longer, may have 108.


@dataclass(frozen=True)
class Processor:
    allowed: frozenset[int]  # The cores on which this process may run
    around: frozenset[int]  # On which the launcher may run, that is, what it could have left to its ranks
    threads: int  # That torch wants for an operation
    domains: tuple[numa.Domain, ...] = ()


def collect_processor(launcher: int) -> Processor:
    around, threads = frozenset(os.sched_getaffinity(launcher)), torch.get_num_threads()
    return Processor(system.cores(), around, threads, numa.read_domains())


def _processors(case: Case, node: Sequence[int]) -> tuple[list[Processor], frozenset[int], frozenset[int]]:
    """Return those of the ranks of a node, the cores that they use together, and all that they could have had."""
    processors = [known(case.ranks[rank].processor) for rank in node]
    used = frozenset().union(*(processor.allowed for processor in processors))
    return processors, used, used.union(*(processor.around for processor in processors))


def check_cores(case: Case, finding: Finding) -> None:
    for node in case.nodes:
        host, ranks, (processors, used, around) = case.host(node), len(node), _processors(case, node)
        allowed = [processor.allowed for processor in processors]
        share = min(topology.cores_per_rank(allowed, index) for index in range(ranks))
        crowded = topology.is_crowded(share)
        on_cores = f"{host}: {plural(ranks, 'rank')} on {plural(len(used), 'core')}"
        finding.note(f"{on_cores}, {share:.3g} for each alone")
        at = case.places(node)
        if fewer := [rank for rank, here in zip(node, allowed, strict=True) if at[rank].cpus < here]:
            left = plural(min(len(at[rank].cpus) for rank in fewer), "core")
            finding.warn(f"{host}: MPI_Init has left {left} to {name_ranks(fewer)}", _MPI_BINDS)
        if case.unmet:
            # It is not known where the other ranks run.
            continue
        if len(idle := around - used) >= (1 if crowded else ranks) and not topology.has_spare_core(share):
            finding.warn(f"{on_cores}, and {len(idle)} more stay idle", _BIND)
        elif crowded:
            advice = f"Start at most {plural(len(used), 'rank')} there: more take turns on the cores."
            finding.warn(f"{on_cores}: too many", advice)


def check_omp_threads(case: Case, finding: Finding) -> None:
    for node in case.nodes:
        processors, used, _ = _processors(case, node)
        threads = sum(processor.threads for processor in processors)
        text = f"{case.host(node)}: torch wants {plural(threads, 'thread')} on {plural(len(used), 'core')}"
        finding.note(text)
        if threads > len(used):
            fitting = max(1, len(used) // len(node))
            finding.warn(text, f"Set OMP_NUM_THREADS={fitting}, or see cores: threads take turns on a core.")


def check_places(case: Case, finding: Finding) -> None:
    if case.unmet:
        raise Skipped("it is not known where the other ranks run")
    for node in case.nodes:
        processors, _, around = _processors(case, node)
        lie = numa.RanksOnNode(case.host(node), processors[0].domains, around, case.places(node))
        if len(lie.usable) > 1:
            finding.note(*lie.lines())
            for oddity in lie.oddities(case.me.launcher.family if case.me.launcher else ""):
                finding.warn(*oddity)
    if not finding.found:
        raise Skipped("no node has several NUMA domains for its ranks: all memory is equally near")


@dataclass(frozen=True)
class SharedMemory:
    total: int  # Bytes of /dev/shm; 0: there is none
    free: int  # That can be written


def collect_shared_memory() -> SharedMemory:
    if not os.path.isdir(SHM_FOLDER):
        return SharedMemory(0, 0)
    state = os.statvfs(SHM_FOLDER)
    free = state.f_bavail * state.f_frsize if os.access(SHM_FOLDER, os.W_OK) else 0
    return SharedMemory(state.f_blocks * state.f_frsize, free)


def mapped_by_hvlike(maps: Path = Path("/proc/self/maps")) -> str | None:
    """Return where the running hvlike of this process shares memory: "memfd" or "/dev/shm"; None: nowhere."""
    text = maps.read_text()
    return "memfd" if "/memfd:hvlike" in text else SHM_FOLDER if f"{SHM_FOLDER}/hvlike-" in text else None


def check_shared_memory(case: Case, finding: Finding) -> None:
    for node in case.nodes:
        facts = case.ranks[node[0]]
        memory = known(facts.memory)
        vendor = "" if isinstance(facts.library, Gap) else facts.library.vendor
        # Where the ranks did not come together all may be here.
        ranks = max(case.unmet, len(node))
        needed = {"Open MPI": _OPEN_MPI_BYTES, "MPICH": ranks * _MPICH_BYTES_A_RANK}.get(vendor, 0)
        room = f"{facts.host}: /dev/shm has {format_size(memory.free)} of {format_size(memory.total)} free to write"
        finding.note(room)
        if memory.free < needed:
            text = f"{facts.host}: {vendor} wants {format_size(needed)} there: it aborts in MPI_Init, or is slow"
            finding.fail(text, _MORE_SHM)
        elif memory.total <= _SMALL_SHM:
            finding.warn(room, f"DataLoader workers pass their batches through it. {_MORE_SHM}")


@dataclass(frozen=True)
class TemporaryFiles:
    path: str
    wrong: str  # Why a file cannot be written there; empty: it can
    kind: str  # The type of the filesystem, as "ext4"; empty where the system does not say


def collect_temporary_files() -> TemporaryFiles:
    """Write a small file into the folder, and take it away. A filesystem that does not answer blocks."""
    # tempfile would pass over a folder that cannot be written, which the check must see.
    path = os.environ.get("TMPDIR") or "/tmp"
    wrong = ""
    try:
        with tempfile.TemporaryFile(dir=path, buffering=0) as file:
            file.write(b"hvlike")
    except OSError as error:
        wrong = f"{type(error).__name__}: {error.strerror}"
    with open("/proc/mounts") as mounts:
        kinds = [(words[1], words[2]) for words in map(str.split, mounts)]
    return TemporaryFiles(path, wrong, kind_of(os.path.realpath(path), kinds))


def kind_of(path: str, mounts: list[tuple[str, str]]) -> str:
    """Return the type of the filesystem that `path` lies on. mounts: mount point and type, in the order of mounting."""
    inside = [mount for mount in mounts if path == mount[0] or path.startswith(mount[0].rstrip("/") + "/")]
    # The last one of the longest: it hides those below it.
    return max(reversed(inside), key=lambda mount: len(mount[0]), default=("", ""))[1]


def check_temporary_files(case: Case, finding: Finding) -> None:
    for facts in case.ranks:
        files = known(facts.files)
        where = f"{files.path} on {facts.host}"
        if files.wrong:
            advice = "MPI and Python need a place for temporary files: set TMPDIR to a writable one."
            finding.fail(f"{where} cannot be written: {files.wrong}", advice)
        elif files.kind in _NETWORK_KINDS:
            advice = "MPI puts its sockets and segments there: set TMPDIR to a local disk."
            finding.warn(f"{where} is a network filesystem ({files.kind})", advice)
        elif len(files.path) > _LONG_PATH:
            advice = "The paths of sockets may have 108 characters: set TMPDIR=/tmp."
            finding.warn(f"{where} is {len(files.path)} characters long", advice)
        else:
            finding.note(where)
