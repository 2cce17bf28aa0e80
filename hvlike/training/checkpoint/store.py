"""save and load: rank 0 writes and reads, all ranks know how it went and have the same."""

from __future__ import annotations

import io
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hvlike.collectives.broadcast import broadcast_
from hvlike.collectives.context import current
from hvlike.collectives.objects import broadcast_object
from hvlike.errors import CheckpointError, UsageError
from hvlike.training.checkpoint import files, parts

logger = logging.getLogger("hvlike")


@dataclass(frozen=True)
class Checkpoint:
    """What load() has loaded."""

    step: int
    """The step it was saved after."""
    path: str
    """Its file, on rank 0."""
    values: dict[str, Any]
    """The plain values that were saved with it."""


def save(folder: str | os.PathLike[str], step: int, *, keep: int = 2, **saved: Any) -> str:
    """Write a checkpoint of models, optimizers and plain values; returns the path of its file on rank 0.

    folder: on a disk of rank 0's node; made if it is not there. step: a number that rises; load() takes the highest.
    keep: how many checkpoints stay, this one among them; older ones are removed once this one is on the disk.
    saved: by name, objects with state_dict() and load_state_dict(), of which a ZeroRedundancyOptimizer is brought
        together and a DistributedDataParallel saved as the module inside of it; or plain values: numbers, strings,
        tensors, lists and dicts of them, as they are on rank 0.
    Collective: every rank calls it with the same arguments, between two steps. Blocks until the file is on the disk.
    A save that is interrupted leaves the earlier checkpoints as they were.
    Raises: UsageError for wrong arguments; CheckpointError on every rank if rank 0 cannot write.
    """
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise UsageError(f"checkpoint.save: step must be a whole number of at least 0, got {step!r}.")
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise UsageError(f"checkpoint.save: keep must be a whole number of at least 1, got {keep!r}.")
    if not saved:
        raise UsageError("checkpoint.save: there is nothing to save. Pass model=model, optimizer=optimizer, ...")
    parts.check_parts(saved, "checkpoint.save")
    world = current().world
    gathered = parts.gather(saved)
    path, error = "", None
    if world.rank == 0:
        try:
            path = _write(Path(folder), step, keep, parts.states(saved, gathered))
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
    """Load the newest checkpoint that is whole into models and optimizers; None where there is none at all.

    folder: as for save; only rank 0 looks into it, and sends what it has read to the others.
    trusted: also load classes that torch.load does not hold for safe; only for files that nobody else can have written.
    into: by name, what was saved under that name. What is left of the file is in the result's `values`.
    Collective: every rank calls it with the same arguments. Blocks until all have it. A file that is damaged is named
    in the log and passed over.
    Raises: CheckpointError on every rank if no file can be read, or a part was not saved; UsageError for a plain value
        in `into`; what load_state_dict raises for a state that does not fit.
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
            f"{name} is whole, but torch cannot load it: {error}. If it holds classes of your own and comes from "
            "nobody else, pass trusted=True."
        ) from error
    return Checkpoint(step, name, parts.restore(into, saved, name))


def _write(folder: Path, step: int, keep: int, states: dict[str, Any]) -> str:
    buffer = io.BytesIO()
    torch.save(states, buffer)
    file = files.write(folder, step, buffer.getbuffer())
    files.prune(folder, keep, file)
    return str(file.path)


def _find(folder: Path) -> tuple[tuple[str, int, int, list[str]], Tensor]:
    """On rank 0, the newest file that is whole: path, step, bytes, what was wrong with newer ones; and its contents."""
    wrong: list[str] = []
    try:
        candidates = files.list_files(folder)
    except OSError as error:
        candidates, wrong = [], [str(error)]
    for file in candidates:
        data = _read(file, wrong)
        if data is not None:
            return (str(file.path), file.step, len(data), wrong), torch.frombuffer(data, dtype=torch.uint8)
    return ("", 0, 0, wrong), torch.empty(0, dtype=torch.uint8, device="cpu")


def _read(file: files.CheckpointFile, wrong: list[str]) -> bytearray | None:
    """The contents; None, with the reason in `wrong`, for a file that cannot be used."""
    try:
        return files.read(file)
    except (OSError, ValueError) as error:
        wrong.append(f"{file.path}: {error}")
        logger.warning("checkpoint %s is passed over: %s", file.path, error)
        return None
