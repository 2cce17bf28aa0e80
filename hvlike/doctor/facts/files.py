"""Clock and filesystems: what a job writes to, and what it measures time with."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

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


def collect() -> Files:
    """Write a small file into each folder, and take it away. A filesystem that does not answer blocks."""
    places = {"temporary files": _temporary(), "working directory": os.getcwd()}
    folders = tuple(_look(purpose, path, _mounts(Path("/proc/mounts"))) for purpose, path in places.items())
    readings = [time.monotonic() for _ in range(1000)]
    return Files(folders, time.time(), readings != sorted(readings))


def _temporary() -> str:
    # tempfile's own choice passes over what cannot be written, which is what we want to see.
    return os.environ.get("TMPDIR") or "/tmp"


def _look(purpose: str, path: str, mounts: list[tuple[str, str]]) -> Folder:
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
