"""The memory that ranks of one node can share: /dev/shm, and files that live in memory only."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hvlike.transport import segment
from hvlike.transport.allocations import available_bytes

FOLDER = "/dev/shm"
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
    """Bytes of memory that the system or the container can still give; None: nobody says."""


def collect() -> SharedMemory:
    """Look at the node. Forks once; call it in a process without threads."""
    total = free = None
    if os.path.isdir(FOLDER):
        state = os.statvfs(FOLDER)
        total, free = state.f_blocks * state.f_frsize, state.f_bavail * state.f_frsize
    return SharedMemory(total, free, _is_writable(), _reaches_memfd(), available_bytes())


def _is_writable() -> bool:
    try:
        with tempfile.TemporaryFile(dir=FOLDER):
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
    return "memfd" if "/memfd:hvlike" in text else FOLDER if f"{FOLDER}/hvlike-" in text else None
