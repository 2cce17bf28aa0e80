"""The files of a checkpoint folder, without MPI and torch: written whole or not at all, named after what is in them.

    checkpoint-000000001200-5f1d0c7be0a94c3d.pt     step 1200; the first 16 digits of the SHA-256 of the file

A file is written under a temporary name, forced to disk, and renamed in one step. Whatever interrupts that, the folder
holds whole checkpoints and at most one file that the next save removes. A file whose contents do not fit its name was
damaged afterwards. `torch.load` reads the files too.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"checkpoint-(\d{12,})-([0-9a-f]{16})\.pt")
_UNFINISHED = ".checkpoint-"


@dataclass(frozen=True)
class CheckpointFile:
    path: Path
    step: int
    digest: str


def list_files(folder: Path) -> list[CheckpointFile]:
    """Return the checkpoints of a folder, the newest first; none where there is no such folder. Raises OSError."""
    if not folder.exists():
        return []
    found = [(path, _NAME.fullmatch(path.name)) for path in folder.iterdir()]
    files = [CheckpointFile(path, int(match[1]), match[2]) for path, match in found if match is not None]
    return sorted(files, key=lambda file: (file.step, file.path.stat().st_mtime_ns), reverse=True)


def write(folder: Path, step: int, data: bytes | memoryview) -> CheckpointFile:
    """Write a checkpoint to the disk. Raises OSError, and leaves no part of the file behind."""
    folder.mkdir(parents=True, exist_ok=True)
    # What a killed save has left: one process at a time writes to a folder.
    for path in folder.glob(f"{_UNFINISHED}*"):
        path.unlink(missing_ok=True)
    digest = digest_of(data)
    unfinished = folder / f"{_UNFINISHED}{os.getpid()}"
    path = folder / f"checkpoint-{step:012d}-{digest}.pt"
    try:
        with unfinished.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError:
        # The first error is the one to report.
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    return CheckpointFile(path, step, digest)


def read(file: CheckpointFile) -> bytearray:
    data = bytearray(file.path.stat().st_size)
    with file.path.open("rb") as source:
        count = source.readinto(data)
    found = digest_of(data)
    if count != len(data) or found != file.digest:
        raise ValueError(f"its contents have the digest {found}, not the one in its name: it was damaged or cut off")
    return data


def prune(folder: Path, keep: int, newest: CheckpointFile) -> None:
    """Remove all but the `keep` newest checkpoints, of which the one just written is the first. Raises OSError."""
    others = [file for file in list_files(folder) if file.path != newest.path]
    older = [file for file in others if file.step <= newest.step]
    for file in older[keep - 1 :]:
        file.path.unlink(missing_ok=True)


def digest_of(data: bytes | bytearray | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
