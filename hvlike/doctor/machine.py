"""Cores, shared memory, clocks and filesystems of a machine, the user's model (--model), and the checks of them."""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from hvlike.backends.shared_memory.region import region_bytes
from hvlike.backends.shared_memory.schedule import chunk_bytes
from hvlike.bench.harness.report import format_size
from hvlike.collectives.requests import plan
from hvlike.collectives.requests.message_table import name_ranks
from hvlike.doctor.finding import Finding, Skipped, of_every_rank, plural
from hvlike.doctor.probe import Gap, known
from hvlike.errors import UsageError
from hvlike.system import mapped_memory
from hvlike.system.system import system
from hvlike.transport.host import topology
from hvlike.transport.memory.allocations import available_bytes

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
_TEMPORARY = "temporary files"
_LITTLE_ROOM = 64 << 20
_LONG_PATH = 80  # Characters. The path of a socket, which is longer, may have 108.
_EARLIEST = 1_735_689_600  # The first of January 2025: a clock that says less was never set
_APART_SECONDS = 1.0  # Between the wall clocks of two hosts
_PART = 1 << 20
_FLOAT_BYTES = 4


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
    available: int | None  # Bytes of memory that the system or the container can still give; None: unknown


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
    return SharedMemory(total, free, writable, _reaches_memfd(), available_bytes())


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
class Folder:
    purpose: str
    path: str
    wrong: str | None  # Why a file cannot be written there; None: it can
    free: int | None  # Bytes; None where the system does not say
    kind: str  # The type of the filesystem, as "ext4"; empty where the system does not say


@dataclass(frozen=True)
class Files:
    folders: tuple[Folder, ...]
    wall_time: float  # Seconds since 1970
    backwards: bool  # The monotonic clock went backwards while it was looked at


def collect_files() -> Files:
    """Write a small file into each folder, and take it away. A filesystem that does not answer blocks."""
    # tempfile would pass over a folder that cannot be written, which the check must see.
    places = {_TEMPORARY: os.environ.get("TMPDIR") or "/tmp", "working directory": os.getcwd()}
    lines = map(str.split, _read_lines(Path("/proc/mounts")))
    mounts = [(words[1], words[2]) for words in lines if len(words) > 2]
    folders = tuple(_look_at_folder(purpose, path, mounts) for purpose, path in places.items())
    readings = [time.monotonic() for _ in range(1000)]
    return Files(folders, time.time(), readings != sorted(readings))


def _look_at_folder(purpose: str, path: str, mounts: list[tuple[str, str]]) -> Folder:
    wrong, free = None, None
    try:
        with tempfile.TemporaryFile(dir=path, buffering=0) as file:
            file.write(b"hvlike")
        state = os.statvfs(path)
        free = state.f_bavail * state.f_frsize
    except OSError as error:
        wrong = f"{type(error).__name__}: {error.strerror}"
    return Folder(purpose, path, wrong, free, kind_of(os.path.realpath(path), mounts))


def kind_of(path: str, mounts: list[tuple[str, str]]) -> str:
    """The type of the filesystem that `path` lies on. mounts: mount point and type, in the order of mounting."""
    inside = [each for each in mounts if path == each[0] or path.startswith(each[0].rstrip("/") + "/")]
    # The last one of the longest: it hides those below it.
    return max(reversed(inside), key=lambda each: len(each[0]), default=("", ""))[1]


def check_clock(case: Case, finding: Finding) -> None:
    files = known(case.me.files)
    finding.note("" if files.backwards else "the monotonic clock goes forward")
    if files.wall_time < _EARLIEST:
        advice = "Set it (`timedatectl set-ntp true`): certificates and file times go wrong."
        finding.fail("the clock of this machine was never set", advice)
    if files.backwards:
        finding.fail("the monotonic clock went backwards", "Look at the virtual machine's clock source.")
    if case.gathered is not None and len(case.nodes) > 1:
        firsts = [case.gathered.wall_times[node[0]] for node in case.nodes]
        apart = max(firsts) - min(firsts)
        finding.note(f"the wall clocks of {len(firsts)} nodes are at most {apart:.3f} s apart")
        if apart > _APART_SECONDS:
            advice = "Run NTP or chrony on every host: otherwise timelines of several nodes do not fit together."
            finding.warn(f"the wall clocks are {apart:.1f} s apart", advice)


def check_filesystems(case: Case, finding: Finding) -> None:
    for folder in known(case.me.files).folders:
        free = "" if folder.free is None else f", {format_size(folder.free)} free"
        finding.note(f"{folder.purpose}: {folder.path} ({folder.kind or 'unknown kind'}{free})")
    for rank, files in of_every_rank(case, lambda each: each.files):
        for folder in files.folders:
            _check_folder(finding, folder, f"rank {rank} on {case.ranks[rank].host}: {folder.path}")


def _check_folder(finding: Finding, folder: Folder, name: str) -> None:
    temporary = folder.purpose == _TEMPORARY
    if folder.wrong is not None:
        text = f"{name} cannot be written: {folder.wrong}"
        if temporary:
            finding.fail(text, "MPI and Python need a place for temporary files: set TMPDIR to a writable one.")
        else:
            advice = "Checkpoints and timelines need another path than a relative one, or start the job elsewhere."
            finding.warn(text, advice)
        return
    if folder.free is not None and folder.free < _LITTLE_ROOM:
        add = finding.fail if temporary and not folder.free else finding.warn
        add(f"{name} has {format_size(folder.free)} left", "Make room there, or set TMPDIR.")
    if temporary and folder.kind in _NETWORK_KINDS:
        text = f"{name} is a network filesystem ({folder.kind})"
        finding.warn(text, "MPI puts its sockets and segments there: set TMPDIR to a local disk.")
    if temporary and len(folder.path) > _LONG_PATH:
        text = f"{name} is {len(folder.path)} characters long"
        finding.warn(text, "The paths of sockets may have 108 characters: set TMPDIR=/tmp.")


@dataclass(frozen=True)
class Model:
    """The gradients that a training step of it reduces."""

    name: str
    sizes: tuple[int, ...]  # Bytes of each gradient, in the order in which backward brings them
    dtypes: tuple[str, ...]


def collect_model(text: str) -> Model:
    """Read a number of float32 parameters (25_000_000, 25e6), or run FILE.py:function. Raises: UsageError."""
    try:
        count = int(float(text))
    except (ValueError, OverflowError):
        count = 0
    if count >= 1:
        whole, rest = divmod(count, _PART)
        parts = [_PART] * whole + [rest] * (rest > 0)
        sizes = tuple(_FLOAT_BYTES * part for part in parts)
        return Model(f"{count:,} float32 parameters", sizes, ("float32",) * len(parts))
    path, colon, name = text.rpartition(":")
    if not colon or not Path(path).is_file():
        expected = "a number of parameters, or FILE.py:function with a file that exists"
        raise UsageError(f"--model {text}: expected {expected}.")
    # What the file imports may lie beside it.
    sys.path.insert(0, str(Path(path).resolve().parent))
    made = runpy.run_path(path, run_name="hvlike_doctor_model").get(name)
    model = made() if callable(made) else made
    if not isinstance(model, nn.Module):
        raise UsageError(f"--model {text}: {name} makes {type(model).__name__}, expected a torch.nn.Module.")
    trained = [each for each in model.parameters() if each.requires_grad]
    trained.reverse()
    return Model(
        f"{type(model).__name__} of {path}",
        tuple(each.nbytes for each in trained),
        tuple(str(each.dtype).removeprefix("torch.") for each in trained),
    )


def check_model(case: Case, finding: Finding) -> None:
    if case.model is None:
        raise Skipped("no model was named: --model FILE.py:function, or --model 25e6 for so many parameters")
    model, memory = known(case.model), known(case.me.memory)
    local, total = len(case.nodes[0]), sum(model.sizes)
    buckets = _bucket_bytes(case, model)
    ring = ring_bytes(local, _LARGEST_RING) if local > 1 else 0
    finding.note(
        f"{model.name}: {format_size(total)} of gradients in {plural(len(buckets), 'bucket')}, the largest of "
        f"{format_size(max(buckets, default=0))}"
    )
    staged = f"they are staged through a ring of {format_size(ring)} a node, whatever their size"
    finding.note(staged if ring else "one rank a node")
    if memory.available is not None and ring > memory.available:
        text = f"the ring needs {format_size(ring)} of memory, {format_size(memory.available)} are left"
        finding.fail(text, "Raise the memory limit of the container, or start fewer ranks on this node.")
    room = memory.available if memory.memfd else memory.free
    if room is not None and local > 1:
        needed = format_size(local * total)
        finding.note(f"gradients in hvd.empty_shared would need {needed} a node; there are {format_size(room)}")


def _bucket_bytes(case: Case, model: Model) -> list[int]:
    """Return the bytes of the buckets, with all settings at their defaults."""
    processors = _processors(case, case.nodes[0])
    share = topology.cores_per_rank([each.allowed for each in processors], 0)
    sizes = plan.choose_sizes(None, None, overlaps=topology.has_spare_core(share), nodes=case.nodes)
    parts = [[index] for index in range(len(model.sizes))]
    buckets = plan.fill_buckets(parts, model.sizes, model.dtypes, *sizes)
    return [sum(model.sizes[index] for index in bucket) for bucket in buckets]
