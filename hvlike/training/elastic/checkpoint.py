"""Checkpoints: rank 0 writes and reads files (checkpoint_files.py), all ranks learn how it went and have the same."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hvlike.collectives.api.broadcast import broadcast_
from hvlike.collectives.api.objects import broadcast_object, describe_error
from hvlike.collectives.api.outcome import settle
from hvlike.collectives.session.context import current
from hvlike.errors import CheckpointError, UsageError
from hvlike.training.distributed_optimizer import DistributedOptimizer
from hvlike.training.elastic.checkpoint_files import CheckpointFile, list_files, prune, read, write
from hvlike.training.elastic.local_parts import unwrapped
from hvlike.training.elastic.local_state import may_be_lost

_PLAIN = (bool, int, float, complex, str, bytes, Tensor, type(None))


def is_stateful(value: object) -> bool:
    """Whether the contents of the value are saved and loaded, and the object stays the same."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _contents_of(value: Any) -> Any:
    return unwrapped(value).state_dict() if is_stateful(value) else value


def restore_parts(parts: Mapping[str, Any], saved: dict[str, Any], where: str) -> dict[str, Any]:
    parts = {name: value for name, value in parts.items() if name in saved or not may_be_lost(value)}
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
        unwrapped(value).load_state_dict(saved[name])
    return {name: value for name, value in saved.items() if name not in parts}


def _strange(value: Any) -> str | None:
    if isinstance(value, _PLAIN):
        return None
    if type(value) in (list, tuple, set):
        return next(filter(None, map(_strange, value)), None)
    if type(value) is dict:
        return next(filter(None, map(_strange, [*value.keys(), *value.values()])), None)
    return type(value).__qualname__


logger = logging.getLogger("hvlike")

# Names of operations, as reports of ranks that wait show them: what the user has called.
_SAVE, _LOAD = "hvd.checkpoint.save", "hvd.checkpoint.load"


def check_values(saved: Mapping[str, Any]) -> None:
    """Raise UsageError for what a checkpoint cannot hold."""
    for name, value in saved.items():
        strange = None if is_stateful(value) else _strange(value)
        if strange is not None:
            raise UsageError(
                f"checkpoint.save: {name} holds a {strange}, which is no plain value. Pass numbers, strings, tensors, "
                "lists and dicts of them, or an object with state_dict() and load_state_dict()."
            )


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
    return save_all(folder, step, saved, keep)


def save_all(folder: str | os.PathLike[str], step: int, saved: Mapping[str, Any], keep: int = 2) -> str:
    """What save() does with values of any name. Collective; blocks. Raises as save() does."""
    check_values(saved)
    world = current().world
    for value in saved.values():
        if callable(getattr(value, "consolidate_state_dict", None)):
            # A ZeroRedundancyOptimizer: its state_dict() is complete on rank 0 after this.
            value.consolidate_state_dict(to=0)
    path, error = "", None
    if world.rank == 0:
        try:
            buffer = io.BytesIO()
            torch.save({name: _contents_of(value) for name, value in saved.items()}, buffer)
            file = write(Path(folder), step, buffer.getbuffer())
            prune(Path(folder), keep, file)
            path = str(file.path)
        except Exception as caught:  # state dicts hold anything, and the other ranks wait
            error = caught
    wrong = "" if error is None else describe_error(error)
    written: str
    written, wrong = broadcast_object((path, wrong), name=_SAVE)
    if wrong:
        raise CheckpointError(
            f"rank 0 cannot write a checkpoint of step {step} into {os.fspath(folder)}: {wrong}. Those that were there "
            "are still there; make room, or pass a folder that rank 0 can write to."
        ) from error
    return written


def load(folder: str | os.PathLike[str], *, trusted: bool = False, **into: Any) -> Checkpoint | None:
    """Load the newest checkpoint that is complete into models and optimizers.

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
    return load_all(folder, into, trusted=trusted)


def load_all(folder: str | os.PathLike[str], into: Mapping[str, Any], *, trusted: bool = False) -> Checkpoint | None:
    """What load() does with parts of any name. Collective; blocks. Raises as load() does."""
    found, data = (
        _find(Path(folder)) if current().world.rank == 0 else (None, torch.empty(0, dtype=torch.uint8, device="cpu"))
    )
    name, step, size, wrong = broadcast_object(found, name=_LOAD)
    if not name:
        if wrong:
            raise CheckpointError(f"no checkpoint in {os.fspath(folder)} of rank 0 can be read: {'; '.join(wrong)}.")
        return None
    memory = settle(
        "checkpoint.load",
        lambda: data if data.numel() == size else torch.empty(size, dtype=torch.uint8, device="cpu"),
        as_it_is=True,
        name=_LOAD,
    )
    broadcast_(memory, 0, name=f"{_LOAD} (data)")
    saved = settle("checkpoint.load", lambda: _unpickled(memory, name, trusted=trusted), as_it_is=True, name=_LOAD)
    values = settle("checkpoint.load", lambda: restore_parts(into, saved, name), as_it_is=True, name=_LOAD)
    return Checkpoint(step, name, values)


def _unpickled(data: Tensor, name: str, *, trusted: bool) -> dict[str, Any]:
    try:
        saved: dict[str, Any] = torch.load(io.BytesIO(data.numpy().data), map_location="cpu", weights_only=not trusted)
    except Exception as error:  # whatever unpickling raises
        raise CheckpointError(
            f"{name} is whole, but torch cannot load it: {error}. If it holds classes of your own and only "
            "you can have written it, pass trusted=True."
        ) from error
    return saved


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
