"""The cores of the machine, those this process may use, and the threads that want to."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from hvlike.transport import cores


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


def collect(launcher: int) -> Processor:
    """Ask the system. Local. launcher: the process that has started this one."""
    return Processor(
        machine=platform.machine(),
        cores=os.cpu_count() or 1,
        allowed=cores.available(),
        around=_around(launcher),
        quota=quota(Path("/")),
        threads=torch.get_num_threads(),
    )


def _around(process: int) -> frozenset[int]:
    try:
        return frozenset(os.sched_getaffinity(process))
    except OSError:
        return cores.available()


def quota(root: Path) -> float | None:
    """The limit of the control group, version 2 or 1."""
    folder = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        group = folder / line.rpartition(":")[2].lstrip("/")
        for words in map(str.split, _lines(group / "cpu.max")[:1]):
            if len(words) == 2 and words[0].isdigit():
                return int(words[0]) / int(words[1])
    first = [_lines(folder / "cpu" / name)[:1] for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
    if all(first) and first[0][0].isdigit():
        return int(first[0][0]) / int(first[1][0])
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
