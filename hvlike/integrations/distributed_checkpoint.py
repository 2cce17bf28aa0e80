"""torch.distributed.checkpoint of wrapped models and optimizers: all ranks write, any number of ranks read.

Tensors have the names that torch gives them: `model.<parameter>` and `optimizer.state.<parameter>.<what>`, without
what a model or an optimizer is wrapped in. So programs without hvlike can read such a checkpoint, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.optim import Optimizer

from hvlike.collectives.api.objects import allgather_object, broadcast_object
from hvlike.collectives.api.outcome import settle
from hvlike.collectives.requests.process_set import ProcessSet, global_process_set
from hvlike.collectives.session import basics
from hvlike.errors import UsageError
from hvlike.integrations.torch_distributed import init_process_group
from hvlike.training.ddp.data_parallel import DistributedDataParallel
from hvlike.training.gradients.optimizer_wrapper import DelegatingOptimizer
from hvlike.training.gradients.reduction import ranks_of_group
from hvlike.training.zero.optimizer import ZeroRedundancyOptimizer

Form = tuple[torch.Size, torch.dtype]

_REST = "rest"  # The entry for everything that is no tensor


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside of a DistributedDataParallel and of what torch.compile makes."""
    while True:
        if isinstance(model, (DistributedDataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]  # torch's stub: any attribute may be a tensor
        else:
            return model


def model_entries(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of the state dict as `model.<name>`, which share the model's memory, and everything else."""
    tensors, rest = {}, {}
    for name, value in unwrapped(model).state_dict().items():
        if isinstance(value, Tensor):
            tensors[f"model.{name}"] = value
        else:
            rest[name] = value
    return tensors, rest


class OptimizerEntries:
    """The state of an optimizer by the names of its parameters; of a ZeroRedundancyOptimizer this rank's share."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Raises: UsageError for parameters that do not belong to the model."""
        self._optimizer = optimizer.wrapped if isinstance(optimizer, DelegatingOptimizer) else optimizer
        names: dict[Tensor, str] = {parameter: name for name, parameter in unwrapped(model).named_parameters()}
        self._groups = [_names(group["params"], names) for group in self._optimizer.param_groups]
        self._names = [name for group in self._groups for name in group]
        kept = self._optimizer.optim if isinstance(self._optimizer, ZeroRedundancyOptimizer) else self._optimizer
        self._kept = {names[parameter] for group in kept.param_groups for parameter in group["params"]}

    def tensors(self) -> dict[str, Tensor]:
        """Return what this rank keeps, as `optimizer.state.<parameter>.<what>`."""
        found = ((_prefix(name) + what, value) for name, each in self._states().items() for what, value in each.items())
        return {entry: value for entry, value in found if isinstance(value, Tensor)}

    def rest(self) -> dict[str, Any]:
        """Return all that is no tensor, of all ranks. For a ZeroRedundancyOptimizer it is collective and blocks."""
        others = {
            name: {what: value for what, value in values.items() if not isinstance(value, Tensor)}
            for name, values in self._states().items()
        }
        if isinstance(self._optimizer, ZeroRedundancyOptimizer):
            everybody = allgather_object(others, process_set=self._optimizer.process_set)
            others = {name: each[name] for each in everybody for name in each}
        options = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self._state()["param_groups"]
        ]
        return {"names": self._groups, "options": options, "others": others}

    def empty(self, saved: Mapping[str, Form]) -> dict[str, Tensor]:
        """Return memory for the saved tensors that this rank will keep."""
        prefixes = {_prefix(name) for name in self._kept}
        # Names of parameters have dots, those of what an optimizer keeps for one do not.
        kept = {entry: form for entry, form in saved.items() if entry.rpartition(".")[0] + "." in prefixes}
        return {entry: torch.empty(shape, dtype=dtype, device="cpu") for entry, (shape, dtype) in kept.items()}

    def load(self, tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> None:
        """Load what `rest` has returned, and what this rank keeps. Raises: UsageError for other parameters."""
        if rest["names"] != self._groups:
            mine, saved = (shorten(str(names), 200, placeholder="...") for names in (self._groups, rest["names"]))
            raise UsageError(
                f"The optimizer has the parameters {mine} in its groups, the one that was saved had {saved}."
            )
        state: dict[int, dict[str, Any]] = {}
        for place, name in enumerate(self._names):
            values = dict(rest["others"].get(name, {})) if name in self._kept else {}
            prefix = _prefix(name)
            for entry, value in tensors.items():
                if entry.rpartition(".")[0] + "." == prefix:
                    values[entry[len(prefix) :]] = value
            if values:
                state[place] = values
        places = iter(range(len(self._names)))
        groups = [
            {**options, "params": [next(places) for _ in names]}
            for options, names in zip(rest["options"], self._groups, strict=True)
        ]
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _state(self) -> dict[str, Any]:
        one = self._optimizer
        return one.sharded_state_dict() if isinstance(one, ZeroRedundancyOptimizer) else one.state_dict()

    def _states(self) -> dict[str, dict[str, Any]]:
        return {self._names[place]: values for place, values in self._state()["state"].items()}


def _names(parameters: list[Tensor], names: Mapping[Tensor, str]) -> list[str]:
    unknown = [number for number, parameter in enumerate(parameters) if parameter not in names]
    if unknown:
        raise UsageError(
            f"Parameters number {unknown[:5]} of a group of the optimizer are not the model's. A checkpoint stores "
            "them by their names in the model."
        )
    return [names[parameter] for parameter in parameters]


def _prefix(name: str) -> str:
    return f"optimizer.state.{name}."


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    **more: Any,
) -> None:
    """Write a model, its optimizer and more into a folder, to which all ranks contribute.

    The folder counts as a checkpoint once everything is on disk. Collective: every rank of the group calls it. Blocks
    until done.

    Args:
        path: A folder in a file system that all ranks see, without a checkpoint in it.
        model: Wrapped in a DistributedDataParallel, or not. The first rank writes its buffers.
        optimizer: Any. Of a ZeroRedundancyOptimizer each rank writes its share.
        process_group: The group of torch.distributed, of the backend "hvlike", that the model is trained in. Default:
            all ranks.
        more: By name, objects with state_dict (schedules, scalers, samplers), and values that pickle. The first rank
            writes its own.

    Raises:
        UsageError: On every rank, where the folder holds a checkpoint.
        CheckpointException: Torch's, on every rank, where a rank could not write.

    Example:
        >>> distributed_checkpoint.save("checkpoints/7", model, optimizer, schedule=schedule, epoch=7)

    Source: torch.distributed.checkpoint.save.
    """
    folder, ranks = Path(path), _ranks_of(process_group)
    if _read_metadata(folder, ranks) is not None:
        raise UsageError(f"{folder} holds a checkpoint already. Save each into a folder of its own.")

    def own() -> tuple[dict[str, Tensor], dict[str, Any], OptimizerEntries | None]:
        tensors, rest = model_entries(model)
        if ranks.rank() != 0:
            # Parameters are equal on all ranks, which write some each; buffers may be each rank's own.
            parameters = {f"model.{name}" for name, _ in unwrapped(model).named_parameters()}
            tensors = {name: tensor for name, tensor in tensors.items() if name in parameters}
        states = {name: each.state_dict() if hasattr(each, "state_dict") else each for name, each in more.items()}
        entries = None if optimizer is None else OptimizerEntries(model, optimizer)
        if entries is not None:
            tensors.update(entries.tensors())
        return tensors, {"model": rest, "more": states}, entries

    tensors, rest, entries = settle("distributed_checkpoint.save", own, ranks, as_it_is=True)
    if entries is not None:
        rest["optimizer"] = entries.rest()
    state: dict[str, Any] = dict(tensors)
    if ranks.rank() == 0:
        state[_REST] = rest
    with _process_group():
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        writer = FileSystemWriter(folder)
        state_dict_saver.save(state, storage_writer=writer, planner=planner, process_group=process_group)


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Read what `save` has written, on any number of ranks, into a model and an optimizer made alike.

    Every rank reads what it keeps, and no other rank's share of a ZeroRedundancyOptimizer. Collective: every rank calls
    it, with the same path. Blocks until done. After an error the model may hold a part of what was saved.

    Args:
        path: The folder.
        model: Wrapped or not, however the one that was saved was wrapped.
        optimizer: The same.
        process_group: As for save; any number of ranks, whatever the number was that saved.
        more: Objects with load_state_dict that were saved by these names.

    Returns:
        The values that were saved by name, other than those that went into the objects of `more`.

    Raises:
        UsageError: On every rank, where there is no complete checkpoint that can be read, or names or shapes are not
            those of the model or optimizer.
        CheckpointException: Torch's, on every rank, where a rank could not read.

    Source: torch.distributed.checkpoint.load.
    """
    folder = Path(path)
    saved = _read_metadata(folder, _ranks_of(process_group))
    if saved is None:
        raise UsageError(f"{folder} holds no complete checkpoint (it has no .metadata).")

    def own() -> tuple[dict[str, Tensor], dict[str, Tensor], OptimizerEntries | None]:
        tensors, _ = model_entries(model)
        _check(folder, tensors, saved)
        entries = None if optimizer is None else OptimizerEntries(model, optimizer)
        kept = {} if entries is None else entries.empty(_forms(saved))
        return tensors, {**tensors, **kept}, entries

    tensors, wanted, entries = settle("distributed_checkpoint.load", own, _ranks_of(process_group), as_it_is=True)
    state: dict[str, Any] = {**wanted, _REST: None}
    with _process_group():
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        reader = FileSystemReader(folder)
        state_dict_loader.load(state, storage_reader=reader, planner=planner, process_group=process_group)
    rest = state[_REST]
    absent = sorted(set(more) - set(rest["more"]))
    if absent:
        raise UsageError(f"{folder} has nothing by the names {absent}; it has {sorted(rest['more'])}.")
    if rest["model"]:
        unwrapped(model).load_state_dict(rest["model"], strict=False)
    if entries is not None:
        if "optimizer" not in rest:
            raise UsageError(f"{folder} was saved without an optimizer.")
        entries.load({name: state[name] for name in wanted.keys() - tensors.keys()}, rest["optimizer"])
    for name, value in more.items():
        value.load_state_dict(rest["more"][name])
    return {name: value for name, value in rest["more"].items() if name not in more}


@contextmanager
def _process_group() -> Iterator[None]:
    """Use torch.distributed as it runs, or start it over hvlike for the block."""
    if dist.is_initialized():
        yield
        return
    init_process_group()
    try:
        yield
    finally:
        dist.destroy_process_group()


def _ranks_of(process_group: dist.ProcessGroup | None) -> ProcessSet:
    basics.init()
    ranks: ProcessSet = ranks_of_group(process_group) or global_process_set
    return ranks


def _read_metadata(folder: Path, ranks: ProcessSet) -> Mapping[str, object] | None:
    """Return on every rank what the first one finds in the folder, by name; None where there is no checkpoint.

    Collective; blocks. Raises: UsageError, on every rank, where it cannot be read.
    """
    problem: str | None = None
    saved: Mapping[str, object] | None = None
    if ranks.rank() == 0:
        try:
            saved = FileSystemReader(folder).read_metadata().state_dict_metadata
        except FileNotFoundError:
            pass  # No checkpoint, or not a complete one
        except Exception as error:  # unpickling a damaged file may raise anything
            problem = f"{type(error).__name__}: {error}"
    problem, saved = broadcast_object((problem, saved), root_rank=(ranks.ranks or [0])[0], process_set=ranks)
    if problem is not None:
        raise UsageError(f"{folder} holds a checkpoint whose .metadata cannot be read ({problem}).")
    return saved


def _forms(saved: Mapping[str, object]) -> dict[str, Form]:
    tensors = {name: entry for name, entry in saved.items() if isinstance(entry, TensorStorageMetadata)}
    return {name: (entry.size, entry.properties.dtype) for name, entry in tensors.items()}


def _check(folder: Path, tensors: Mapping[str, Tensor], saved: Mapping[str, object]) -> None:
    """Raise UsageError where the model has tensors that were not saved, or of other shapes, or fewer."""
    forms = _forms(saved)
    problems = [f"{name} is not in it" for name in tensors if name not in forms]
    problems += [
        f"{name} is not in the model" for name in sorted(forms) if name.startswith("model.") and name not in tensors
    ]
    for name, tensor in tensors.items():
        if name in forms and forms[name][0] != tensor.shape:
            problems.append(f"{name} has the shape {list(forms[name][0])} there and {list(tensor.shape)} here")
    if not isinstance(saved.get(_REST), BytesStorageMetadata):
        problems.append("it was not written by hvlike.integrations.distributed_checkpoint.save")
    if problems:
        raise UsageError(f"{folder} does not fit the model: {'; '.join(problems[:5])}.")
