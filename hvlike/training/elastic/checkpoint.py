"""Checkpoints: rank 0 writes and reads, all ranks learn how it went and have the same.

Files are written whole or not at all, and named after their step and what is in them:

    checkpoint-000000001200-5f1d0c7be0a94c3d.pt     step 1200; the first 16 digits of the SHA-256 of the file

A file is written under a temporary name, forced to disk, and renamed in one step. Whatever interrupts that, the folder
holds whole checkpoints and at most one file that the next save removes. A file whose contents do not fit its name was
damaged afterwards. `torch.load` reads the files too.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hvlike.collectives.api.broadcast import broadcast_
from hvlike.collectives.api.objects import broadcast_object
from hvlike.collectives.session.basics import rank, size
from hvlike.collectives.session.context import current
from hvlike.errors import CheckpointError, UsageError
from hvlike.training.optimizer.distributed import DistributedOptimizer

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


def gather_optimizer_state(optimizer: DistributedOptimizer, root_rank: int = 0) -> dict[str, Any] | None:
    """Return, on the root, the optimizer's state dict with the compression errors of all ranks in it.

    Saved by the root and loaded by every rank, it continues a compressed run exactly, in a job of the same size.
    Without a compressor that remembers errors it is `optimizer.state_dict()`.
    Collective: every rank of the optimizer's process set calls it, between steps. Blocks until done. Besides what the
    root keeps, the errors of one rank at a time are in memory.

    Args:
        optimizer: The DistributedOptimizer.
        root_rank: Rank of the root in the job.

    Returns:
        The state dict; None on the other ranks.

    Raises:
        UsageError: optimizer is no DistributedOptimizer.
    """
    if not isinstance(optimizer, DistributedOptimizer):
        raise UsageError(f"gather_optimizer_state expects a DistributedOptimizer, got {type(optimizer).__name__}.")
    process_set = optimizer.process_set
    state = optimizer.state_dict()
    memory = state.get("compression")
    errors: dict[int, dict[str, Tensor]] = {}
    for each in process_set.ranks or range(size()):
        # Sent from host memory, so that the root does not get them on its GPU.
        kept = memory["errors"] if memory is not None and each == rank() else {}
        own = {number: {name: error.cpu() for name, error in found.items()} for number, found in kept.items()}
        received = broadcast_object(own, each, process_set=process_set)
        if rank() == root_rank:
            errors.update(received)
    if rank() != root_rank:
        return None
    return state if memory is None else state | {"compression": memory | {"errors": errors}}


_PLAIN = (bool, int, float, complex, str, bytes, Tensor, type(None))


def is_stateful(value: object) -> bool:
    """Whether the contents of the value are saved and loaded, and the object stays the same."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def restore_parts(parts: Mapping[str, Any], saved: dict[str, Any], where: str) -> dict[str, Any]:
    for name, value in parts.items():
        if not is_stateful(value):
            raise UsageError(
                f"checkpoint.load: {name} is a {type(value).__name__}, which cannot be loaded into. Plain values are "
                "in the result: loaded.values[...]."
            )
        if name not in saved:
            raise CheckpointError(f"{where} has no part {name!r}; it has {', '.join(sorted(saved)) or 'none'}.")
    for name, value in parts.items():
        if isinstance(value, DistributedOptimizer):
            # Forgets a step that an error has interrupted.
            value.abandon()
        _unwrapped(value).load_state_dict(saved[name])
    return {name: value for name, value in saved.items() if name not in parts}


def _unwrapped(value: Any) -> Any:
    """The module inside a DistributedDataParallel: its names then fit the model without it."""
    inner = getattr(value, "module", None)
    wraps = isinstance(value, nn.Module) and type(value).__name__ == "DistributedDataParallel"
    return inner if wraps and isinstance(inner, nn.Module) else value


def _strange(value: Any) -> str | None:
    if isinstance(value, _PLAIN):
        return None
    if type(value) in (list, tuple, set):
        return next(filter(None, map(_strange, value)), None)
    if type(value) is dict:
        return next(filter(None, map(_strange, [*value.keys(), *value.values()])), None)
    return type(value).__qualname__


logger = logging.getLogger("hvlike")


@dataclass(frozen=True)
class Checkpoint:
    """What load() has loaded: the step after which it was saved, its file on rank 0, and the plain values by name."""

    step: int
    path: str
    values: dict[str, Any]


def save(folder: str | os.PathLike[str], step: int, *, keep: int = 2, **saved: Any) -> str:
    """Write a checkpoint of models, optimizers and plain values.

    Collective: every rank calls it with the same arguments, between two steps. Blocks until the file is on the disk.
    A save that is interrupted leaves the earlier checkpoints as they were.

    Args:
        folder: On a disk of rank 0's node; made if it is not there.
        step: A number that rises, at least 0; load() takes the highest.
        keep: How many checkpoints stay, this one among them. Older ones are removed once this one is on the disk.
        saved: What to save, by name. Objects with state_dict() and load_state_dict(), of which the state of a
            ZeroRedundancyOptimizer is collected from all ranks and a DistributedDataParallel is saved as its module.
            Or plain values, as they are on rank 0: numbers, strings, tensors, lists and dicts of them.

    Returns:
        The path of the file on rank 0.

    Raises:
        UsageError: An argument is wrong.
        CheckpointError: On every rank: rank 0 cannot write.

    Example:
        hvd.checkpoint.save("checkpoints", step, model=model, optimizer=optimizer)
    """
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise UsageError(f"checkpoint.save: step must be a whole number of at least 0, got {step!r}.")
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise UsageError(f"checkpoint.save: keep must be a whole number of at least 1, got {keep!r}.")
    if not saved:
        raise UsageError("checkpoint.save: there is nothing to save. Pass model=model, optimizer=optimizer, ...")
    for name, value in saved.items():
        strange = None if is_stateful(value) else _strange(value)
        if strange is not None:
            raise UsageError(
                f"checkpoint.save: {name} holds a {strange}, which is no plain value. Pass numbers, strings, tensors, "
                "lists and dicts of them, or an object with state_dict() and load_state_dict()."
            )
    world = current().world
    gathered: dict[str, Any] = {}
    for name, value in saved.items():
        if isinstance(value, DistributedOptimizer):
            if "compression" in value.state_dict():
                gathered[name] = gather_optimizer_state(value)
        elif callable(getattr(value, "consolidate_state_dict", None)):
            # A ZeroRedundancyOptimizer: its state_dict() is complete on rank 0 after this.
            value.consolidate_state_dict(to=0)
    path, error = "", None
    if world.rank == 0:
        try:
            buffer = io.BytesIO()
            for name, value in saved.items():
                if name not in gathered:
                    gathered[name] = _unwrapped(value).state_dict() if is_stateful(value) else value
            torch.save(gathered, buffer)
            file = write(Path(folder), step, buffer.getbuffer())
            prune(Path(folder), keep, file)
            path = str(file.path)
        except Exception as caught:  # state dicts hold anything, and the other ranks wait
            error = caught
    wrong = "" if error is None else f"{type(error).__name__}: {error}"
    written: str
    written, wrong = broadcast_object((path, wrong), name="hvlike.checkpoint.save")
    if wrong:
        raise CheckpointError(
            f"rank 0 cannot write a checkpoint of step {step} into {os.fspath(folder)}: {wrong}. Those that were there "
            "are still there; make room, or pass a folder that rank 0 can write to."
        ) from error
    return written


def load(folder: str | os.PathLike[str], *, trusted: bool = False, **into: Any) -> Checkpoint | None:
    """Load the newest checkpoint that is whole into models and optimizers.

    Collective: every rank calls it with the same arguments. Blocks until all have it. A file that is damaged is named
    in the log and passed over.

    Args:
        folder: As for save(). Only rank 0 reads it, and sends the contents to the others.
        trusted: Also load classes that torch.load does not consider safe; only for files that nobody else can have
            written.
        into: By name, the objects that were saved under that name. What else is in the file is in the result's
            `values`.

    Returns:
        What was loaded; None where there is no checkpoint.

    Raises:
        CheckpointError: On every rank: no file can be read, or a part was not saved.
        UsageError: A plain value is in `into`.

    Example:
        loaded = hvd.checkpoint.load("checkpoints", model=model, optimizer=optimizer)
    """
    found, data = (
        _find(Path(folder)) if current().world.rank == 0 else (None, torch.empty(0, dtype=torch.uint8, device="cpu"))
    )
    name, step, size, wrong = broadcast_object(found, name="hvlike.checkpoint.found")
    if not name:
        if wrong:
            raise CheckpointError(f"no checkpoint in {os.fspath(folder)} of rank 0 can be read: {'; '.join(wrong)}.")
        return None
    if data.numel() != size:
        data = torch.empty(size, dtype=torch.uint8, device="cpu")
    broadcast_(data, 0, name="hvlike.checkpoint.data")
    try:
        saved = torch.load(io.BytesIO(data.numpy().data), map_location="cpu", weights_only=not trusted)
    except Exception as error:  # whatever unpickling raises
        raise CheckpointError(
            f"{name} is whole, but torch cannot load it: {error}. If it holds classes of your own and only "
            "you can have written it, pass trusted=True."
        ) from error
    return Checkpoint(step, name, restore_parts(into, saved, name))


def _find(folder: Path) -> tuple[tuple[str, int, int, list[str]], Tensor]:
    """Find the newest file that is whole, on rank 0: path, step, bytes, faults of newer ones; and its contents."""
    wrong: list[str] = []
    try:
        candidates = list_files(folder)
    except OSError as error:
        candidates, wrong = [], [str(error)]
    for file in candidates:
        data = _read_or_say_why(file, wrong)
        if data is not None:
            return (str(file.path), file.step, len(data), wrong), torch.frombuffer(data, dtype=torch.uint8)
    return ("", 0, 0, wrong), torch.empty(0, dtype=torch.uint8, device="cpu")


def _read_or_say_why(file: CheckpointFile, wrong: list[str]) -> bytearray | None:
    try:
        return read(file)
    except (OSError, ValueError) as error:
        wrong.append(f"{file.path}: {error}")
        logger.warning("checkpoint %s is passed over: %s", file.path, error)
        return None
