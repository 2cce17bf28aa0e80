"""Cores, shared memory and temporary files of a machine, and the checks of them."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hvlike.backends.shared_memory.region import region_bytes
from hvlike.backends.shared_memory.schedule import chunk_bytes
from hvlike.collectives.requests.message_table import name_ranks
from hvlike.doctor.finding import Finding, of_every_rank, plural
from hvlike.doctor.probe import Gap, known
from hvlike.observe.printing import format_size
from hvlike.system import mapped_memory
from hvlike.system.system import system
from hvlike.transport.host import topology

if TYPE_CHECKING:
    from hvlike.doctor.job import Case

_BIND = (
    "Let the ranks use them: `mpirun --bind-to none` (Open MPI 5 binds each rank to one core), `mpiexec -bind-to none` "
    "(MPICH), `srun --cpu-bind=none` or `--cpus-per-task=N`."
)
SHM_FOLDER = "/dev/shm"
_TRIAL_BYTES = 4096
# Room that Open MPI 5 wants to see in /dev/shm when a rank makes its segment; without it, it aborts or takes TCP.
_OPEN_MPI_BYTES = 16 << 20
_MPICH_BYTES_A_RANK = 1 << 20
_SMALL_SHM = 64 << 20
_LARGEST_RING, _SMALLEST_RING = 2 << 20, 64 << 10  # Budgets, in bytes, of the staging ring of one queue
_QUEUES = 3  # Those of a training: requests, small requests at once, and the gradients of one optimizer
_MORE_SHM = (
    "Give it more room: `docker run --shm-size=1g`, in Kubernetes an emptyDir of medium Memory on /dev/shm, else "
    "`mount -o remount,size=1g /dev/shm`."
)
_NETWORK_KINDS = ("nfs", "nfs4", "lustre", "gpfs", "cifs", "smb3", "beegfs", "ceph", "fuse.sshfs", "9p", "afs")
_LONG_PATH = 80  # Characters. The path of a socket, which is longer, may have 108.


@dataclass(frozen=True)
class Processor:
    cores: int  # Of the machine
    allowed: frozenset[int]  # On which this process may run
    around: frozenset[int]  # On which the launcher may run, that is, what it could have left to its ranks
    quota: float | None  # Cores' worth of time that the container may use; None: no limit is known
    threads: int  # That torch wants for an operation


def collect_processor(launcher: int) -> Processor:
    allowed = system.cores()
    try:
        around = frozenset(os.sched_getaffinity(launcher))
    except OSError:
        around = allowed
    return Processor(os.cpu_count() or 1, allowed, around, quota(Path("/")), torch.get_num_threads())


def quota(root: Path) -> float | None:
    """Return the cores that the control group allows, version 2 or 1."""
    folder = root / "sys/fs/cgroup"
    for line in _read_lines(root / "proc/self/cgroup"):
        group = folder / line.rpartition(":")[2].lstrip("/")
        for words in map(str.split, _read_lines(group / "cpu.max")[:1]):
            if len(words) == 2 and words[0].isdigit():
                return int(words[0]) / int(words[1])
    first = [_read_lines(folder / "cpu" / name)[:1] for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
    if all(first) and first[0][0].isdigit():
        return int(first[0][0]) / int(first[1][0])
    return None


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _processors(case: Case, node: tuple[int, ...]) -> list[Processor]:
    return [known(case.ranks[rank].processor) for rank in node]


def check_cores(case: Case, finding: Finding) -> None:
    for node in case.nodes:
        host, ranks, processors = case.host(node), len(node), _processors(case, node)
        allowed = [each.allowed for each in processors]
        shares = [topology.cores_per_rank(allowed, index) for index in range(ranks)]
        bound = " or ".join(map(str, sorted({len(each) for each in allowed})))
        finding.note(
            f"{host}: {processors[0].cores} cores; {plural(ranks, 'rank')}, allowed on {bound}, "
            f"with {min(shares):.3g} for each alone"
        )
        if case.unmet:
            # It is not known where the other ranks run.
            continue
        used = frozenset().union(*allowed)
        idle = frozenset().union(*(each.around for each in processors)) - used
        crowded = [rank for rank, share in zip(node, shares, strict=True) if topology.is_crowded(share)]
        if crowded and idle:
            text = f"{host}: {name_ranks(crowded)} share {plural(len(used), 'core')}, and {len(idle)} more stay idle"
            finding.warn(text, _BIND)
        elif not all(map(topology.has_spare_core, shares)) and len(idle) >= ranks:
            text = f"{host}: ranks are bound to a core each, and {len(idle)} more stay idle"
            finding.warn(text, f"Gradients could be reduced beside backward, and data be loaded. {_BIND}")
        elif crowded:
            text = f"{host}: {ranks} ranks on {plural(len(used), 'core')}"
            finding.warn(text, f"Start at most {len(used)} ranks there: more take turns on the cores.")
        quota = processors[0].quota
        if quota is not None and quota < ranks:
            text = f"{host}: the container may use {quota:g} cores' worth of time for {ranks} ranks"
            finding.warn(text, "Raise the limit (docker run --cpus) or start fewer ranks.")


def check_omp_threads(case: Case, finding: Finding) -> None:
    set_to = case.me.environment.omp_threads
    finding.note(f"OMP_NUM_THREADS is {'not set' if set_to is None else set_to}")
    for node in case.nodes:
        host, processors = case.host(node), _processors(case, node)
        finding.note(f"{host}: torch wants {plural(processors[0].threads, 'thread')} a rank")
        wanted = sum(each.threads for each in processors)
        cores = len(frozenset().union(*(each.allowed for each in processors)))
        narrow = [(rank, each) for rank, each in zip(node, processors, strict=True) if each.threads > len(each.allowed)]
        if narrow:
            first = narrow[0][1]
            ranks, allowed = name_ranks([rank for rank, _ in narrow]), len(first.allowed)
            text = f"{ranks} of {host} want {first.threads} threads on {plural(allowed, 'core')}"
            finding.warn(text, f"{_BIND} Or set OMP_NUM_THREADS={allowed}.")
        elif wanted > cores and len(node) > 1:
            advice = f"Set OMP_NUM_THREADS={max(1, cores // len(node))}: threads of several ranks take turns on a core."
            finding.warn(f"{host}: {wanted} threads on {cores} cores", advice)


@dataclass(frozen=True)
class SharedMemory:
    total: int | None  # Bytes of /dev/shm; None: there is none
    free: int | None
    writable: bool
    memfd: bool  # Another process of this node can map a file without a name, which no size of /dev/shm limits


def collect_shared_memory() -> SharedMemory:
    """Look at the node. Forks once; call it in a process without threads."""
    total = free = None
    if os.path.isdir(SHM_FOLDER):
        state = os.statvfs(SHM_FOLDER)
        total, free = state.f_blocks * state.f_frsize, state.f_bavail * state.f_frsize
    try:
        tempfile.TemporaryFile(dir=SHM_FOLDER).close()
        writable = True
    except OSError:
        writable = False
    return SharedMemory(total, free, writable, _reaches_memfd())


def _reaches_memfd() -> bool:
    """Whether a child can map what this process has made, as ranks do with each other."""
    made = mapped_memory.make_offer(_TRIAL_BYTES, 0)
    if made is None:
        return False
    child = os.fork()
    if child == 0:
        # A child is nearer than another rank, but what forbids one mostly forbids the other.
        os._exit(0 if mapped_memory.accept(made.offer) is not None else 1)
    _, status = os.waitpid(child, 0)
    made.withdraw()
    return status == 0


def mapped_by_hvlike(root: Path = Path("/proc/self/maps")) -> str | None:
    """Where the running hvlike of this process shares memory: "memfd" or "/dev/shm"; None: nowhere."""
    text = root.read_text()
    return "memfd" if "/memfd:hvlike" in text else SHM_FOLDER if f"{SHM_FOLDER}/hvlike-" in text else None


def check_shared_memory(case: Case, finding: Finding) -> None:
    for node in case.nodes:
        facts = case.ranks[node[0]]
        memory = known(facts.memory)
        vendor = "" if isinstance(facts.library, Gap) else facts.library.vendor
        where = f"{facts.host}: " if len(case.nodes) > 1 else ""
        if memory.total is None or memory.free is None:
            finding.note(f"{where}there is no /dev/shm")
        else:
            sharing = "can be shared too" if memory.memfd else "is refused"
            sizes = f"{format_size(memory.free)} of {format_size(memory.total)} free"
            finding.note(f"{where}/dev/shm: {sizes}; memory without a name {sharing}")
        # Where the ranks did not come together all may be here.
        local = max(case.unmet, len(node))
        _check_room(finding, where, memory, vendor, local)


def _check_room(finding: Finding, where: str, memory: SharedMemory, vendor: str, local: int) -> None:
    enough, free = True, memory.free or 0
    needed = {"Open MPI": _OPEN_MPI_BYTES, "MPICH": local * _MPICH_BYTES_A_RANK}.get(vendor, 0)
    if needed and memory.free is not None and not memory.writable:
        enough = False
        finding.fail(f"{where}/dev/shm cannot be written to", "Mount it writable (`docker run --tmpfs /dev/shm`).")
    elif free < needed:
        enough, room = False, "nothing" if memory.free is None else format_size(free)
        text = f"{where}{vendor} wants {format_size(needed)} there and finds {room}: it aborts in MPI_Init, or is slow"
        finding.fail(text, _MORE_SHM)
    least, best = (_QUEUES * ring_bytes(local, budget) for budget in (_SMALLEST_RING, _LARGEST_RING))
    # hvlike uses /dev/shm only where memory without a name is refused.
    if not memory.memfd and local > 1 and free < best:
        enough = False
        if free < least:
            text = f"{where}hvlike needs {format_size(least)} for {local} ranks of a node"
            finding.fail(text, f"{_MORE_SHM} Or let the ranks see each other's processes: one PID namespace.")
        else:
            text = f"{where}the staging rings of {local} ranks would like {format_size(best)}: smaller ones are slower"
            finding.warn(text, _MORE_SHM)
    if enough and memory.total is not None and memory.total <= _SMALL_SHM:
        text = f"{where}/dev/shm has no more than {format_size(memory.total)}"
        finding.warn(text, f"DataLoader workers pass their batches through it. {_MORE_SHM}")


def ring_bytes(local: int, budget: int) -> int:
    return region_bytes(local, chunk_bytes(local, budget))


@dataclass(frozen=True)
class TemporaryFiles:
    path: str
    wrong: str | None  # Why a file cannot be written there; None: it can
    kind: str  # The type of the filesystem, as "ext4"; empty where the system does not say


def collect_temporary_files() -> TemporaryFiles:
    """Write a small file into the folder, and take it away. A filesystem that does not answer blocks."""
    # tempfile would pass over a folder that cannot be written, which the check must see.
    path = os.environ.get("TMPDIR") or "/tmp"
    wrong = None
    try:
        with tempfile.TemporaryFile(dir=path, buffering=0) as file:
            file.write(b"hvlike")
    except OSError as error:
        wrong = f"{type(error).__name__}: {error.strerror}"
    lines = map(str.split, _read_lines(Path("/proc/mounts")))
    mounts = [(words[1], words[2]) for words in lines if len(words) > 2]
    return TemporaryFiles(path, wrong, kind_of(os.path.realpath(path), mounts))


def kind_of(path: str, mounts: list[tuple[str, str]]) -> str:
    """Return the type of the filesystem that `path` lies on. mounts: mount point and type, in the order of mounting."""
    inside = [mount for mount in mounts if path == mount[0] or path.startswith(mount[0].rstrip("/") + "/")]
    # The last one of the longest: it hides those below it.
    return max(reversed(inside), key=lambda mount: len(mount[0]), default=("", ""))[1]


def check_temporary_files(case: Case, finding: Finding) -> None:
    own = known(case.me.files)
    finding.note(f"{own.path} ({own.kind or 'unknown kind'})")
    for rank, files in of_every_rank(case, lambda facts: facts.files):
        name = f"rank {rank} on {case.ranks[rank].host}: {files.path}"
        if files.wrong is not None:
            text = f"{name} cannot be written: {files.wrong}"
            finding.fail(text, "MPI and Python need a place for temporary files: set TMPDIR to a writable one.")
        elif files.kind in _NETWORK_KINDS:
            text = f"{name} is a network filesystem ({files.kind})"
            finding.warn(text, "MPI puts its sockets and segments there: set TMPDIR to a local disk.")
        elif len(files.path) > _LONG_PATH:
            text = f"{name} is {len(files.path)} characters long"
            finding.warn(text, "The paths of sockets may have 108 characters: set TMPDIR=/tmp.")
