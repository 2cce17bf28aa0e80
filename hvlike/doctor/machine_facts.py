"""The cores, shared memory, clocks and filesystems of a machine, and the gradients of a model. Collects only."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from hvlike.errors import UsageError
from hvlike.transport.host.topology import available_cores
from hvlike.transport.memory import segment
from hvlike.transport.memory.allocations import available_bytes


@dataclass(frozen=True)
class Processor:
    """Cores and threads of one process."""

    machine: str
    """As x86_64."""
    cores: int
    """Of the machine."""
    allowed: frozenset[int]
    """On which this process may run."""
    around: frozenset[int]
    """On which the launcher may run, that is, what it could have left to its ranks."""
    quota: float | None
    """Cores' worth of time that the container may use; None: no limit is known."""
    threads: int
    """That torch wants for an operation."""


def collect_processor(launcher: int) -> Processor:
    """Ask the system. Local. launcher: the process that has started this one."""
    return Processor(
        machine=platform.machine(),
        cores=os.cpu_count() or 1,
        allowed=available_cores(),
        around=_launcher_cores(launcher),
        quota=quota(Path("/")),
        threads=torch.get_num_threads(),
    )


def _launcher_cores(process: int) -> frozenset[int]:
    try:
        return frozenset(os.sched_getaffinity(process))
    except OSError:
        return available_cores()


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


SHM_FOLDER = "/dev/shm"
_TRIAL_BYTES = 4096


@dataclass(frozen=True)
class SharedMemory:
    """What the node offers."""

    total: int | None
    """Bytes of /dev/shm; None: there is none."""
    free: int | None
    writable: bool
    memfd: bool
    """Another process of this node can map a file without a name, which no size of /dev/shm limits."""
    available: int | None
    """Bytes of memory that the system or the container can still give; None: unknown."""


def collect_shared_memory() -> SharedMemory:
    """Look at the node. Forks once; call it in a process without threads."""
    total = free = None
    if os.path.isdir(SHM_FOLDER):
        state = os.statvfs(SHM_FOLDER)
        total, free = state.f_blocks * state.f_frsize, state.f_bavail * state.f_frsize
    return SharedMemory(total, free, _is_writable(), _reaches_memfd(), available_bytes())


def _is_writable() -> bool:
    try:
        with tempfile.TemporaryFile(dir=SHM_FOLDER):
            return True
    except OSError:
        return False


def _reaches_memfd() -> bool:
    """Whether a child can map what this process has made, as ranks do with each other."""
    made = segment.make_offer(_TRIAL_BYTES, 0)
    if made is None:
        return False
    child = os.fork()
    if child == 0:
        # A child is nearer than another rank, but what forbids one mostly forbids the other.
        os._exit(0 if segment.accept(made.offer) is not None else 1)
    _, status = os.waitpid(child, 0)
    made.withdraw()
    return status == 0


def mapped_by_hvlike(root: Path = Path("/proc/self/maps")) -> str | None:
    """Where the running hvlike of this process shares memory: "memfd" or "/dev/shm"; None: nowhere."""
    text = root.read_text()
    return "memfd" if "/memfd:hvlike" in text else SHM_FOLDER if f"{SHM_FOLDER}/hvlike-" in text else None


_NETWORK_KINDS = frozenset(
    {"nfs", "nfs4", "lustre", "gpfs", "cifs", "smb3", "beegfs", "ceph", "fuse.sshfs", "9p", "afs"}
)


@dataclass(frozen=True)
class Folder:
    """A place that is written to."""

    purpose: str
    path: str
    wrong: str | None
    """Why a file cannot be written there; None: it can."""
    free: int | None
    """Bytes; None where the system does not say."""
    kind: str
    """The type of the filesystem, as "ext4"; empty where the system does not say."""
    network: bool


@dataclass(frozen=True)
class Files:
    """The places of one process, and its clocks."""

    folders: tuple[Folder, ...]
    wall_time: float
    """Seconds since 1970."""
    backwards: bool
    """The monotonic clock went backwards while it was looked at."""


def collect_files() -> Files:
    """Write a small file into each folder, and take it away. A filesystem that does not answer blocks."""
    places = {"temporary files": _temporary(), "working directory": os.getcwd()}
    folders = tuple(_look_at_folder(purpose, path, _mounts(Path("/proc/mounts"))) for purpose, path in places.items())
    readings = [time.monotonic() for _ in range(1000)]
    return Files(folders, time.time(), readings != sorted(readings))


def _temporary() -> str:
    # tempfile would pass over a folder that cannot be written, which the check must see.
    return os.environ.get("TMPDIR") or "/tmp"


def _look_at_folder(purpose: str, path: str, mounts: list[tuple[str, str]]) -> Folder:
    wrong, free = None, None
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"hvlike")
            file.flush()
        state = os.statvfs(path)
        free = state.f_bavail * state.f_frsize
    except OSError as error:
        wrong = f"{type(error).__name__}: {error.strerror}"
    kind = kind_of(os.path.realpath(path), mounts)
    return Folder(purpose, path, wrong, free, kind, kind in _NETWORK_KINDS)


def kind_of(path: str, mounts: list[tuple[str, str]]) -> str:
    """The type of the filesystem that `path` lies on. mounts: mount point and type, in the order of mounting."""
    best = ("", "")
    for point, kind in mounts:
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best[0]):
            best = (point, kind)
    return best[1]


def _mounts(table: Path) -> list[tuple[str, str]]:
    try:
        lines = table.read_text().splitlines()
    except OSError:
        return []
    return [(words[1], words[2]) for words in map(str.split, lines) if len(words) > 2]


_PART = 1 << 20
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class Model:
    """The gradients that a training step of it reduces."""

    name: str
    sizes: tuple[int, ...]
    """Bytes of each gradient, in the order in which backward brings them."""
    dtypes: tuple[str, ...]


def is_number(text: str) -> bool:
    """Whether `text` is a number of parameters, as 25000000, 25_000_000 or 25e6."""
    try:
        return float(text) >= 1
    except ValueError:
        return False


def collect_model(text: str) -> Model:
    """Read a number of float32 parameters, or run FILE.py:function, which is the user's code.

    Raises: UsageError for what is neither, or makes no torch.nn.Module.
    """
    if is_number(text):
        whole, rest = divmod(int(float(text)), _PART)
        parts = [_PART] * whole + [rest] * (rest > 0)
        sizes = tuple(_FLOAT_BYTES * part for part in parts)
        return Model(f"{int(float(text)):,} float32 parameters", sizes, ("float32",) * len(parts))
    path, colon, name = text.rpartition(":")
    if not colon or not Path(path).is_file():
        raise UsageError(
            f"--model {text}: expected a number of parameters, or FILE.py:function with a file that exists."
        )
    made = getattr(_load_module(Path(path)), name, None)
    model = made() if callable(made) else made
    if not isinstance(model, nn.Module):
        raise UsageError(f"--model {text}: {name} makes {type(model).__name__}, expected a torch.nn.Module.")
    trained = [each for each in model.parameters() if each.requires_grad]
    trained.reverse()
    return Model(
        f"{type(model).__name__} of {path}",
        tuple(each.numel() * each.element_size() for each in trained),
        tuple(str(each.dtype).removeprefix("torch.") for each in trained),
    )


def _load_module(path: Path) -> object:
    """The module of a file; what it imports may lie beside it."""
    specification = importlib.util.spec_from_file_location("hvlike_doctor_model", path)
    if specification is None or specification.loader is None:
        raise UsageError(f"--model {path}: not a Python file.")
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    sys.path.insert(0, str(path.resolve().parent))
    specification.loader.exec_module(module)
    return module
