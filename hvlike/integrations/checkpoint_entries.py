"""A model and an optimizer as entries of a checkpoint: tensors by name, and the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvlike.collectives.objects import allgather_object
from hvlike.errors import UsageError
from hvlike.training.ddp.data_parallel import DistributedDataParallel
from hvlike.training.delegation import DelegatingOptimizer
from hvlike.training.zero.optimizer import ZeroRedundancyOptimizer

Form = tuple[torch.Size, torch.dtype]


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside of a DistributedDataParallel, or of what torch.compile makes."""
    while True:
        if isinstance(model, (DistributedDataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]  # torch's stub: any attribute may be a tensor
        else:
            return model


def model_entries(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of the state dict as `model.<name>`, the model's own memory, and what else is in it."""
    tensors, rest = {}, {}
    for name, value in unwrapped(model).state_dict().items():
        if isinstance(value, Tensor):
            tensors[f"model.{name}"] = value
        else:
            rest[name] = value
    return tensors, rest


class OptimizerEntries:
    """The state of an optimizer by the names of its parameters in the model.

    Of a ZeroRedundancyOptimizer it is this rank's share; together the ranks have all of it.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Local. Raises: UsageError for parameters that are not the model's."""
        self._optimizer = optimizer.wrapped if isinstance(optimizer, DelegatingOptimizer) else optimizer
        names: dict[Tensor, str] = {parameter: name for name, parameter in unwrapped(model).named_parameters()}
        self._groups = [_names(group["params"], names) for group in self._optimizer.param_groups]
        self._names = [name for group in self._groups for name in group]
        kept = self._optimizer.optim if isinstance(self._optimizer, ZeroRedundancyOptimizer) else self._optimizer
        self._kept = {names[parameter] for group in kept.param_groups for parameter in group["params"]}

    def tensors(self) -> dict[str, Tensor]:
        """Return what this rank keeps, as `optimizer.state.<parameter>.<what>`. Local."""
        return {
            f"{_prefix(name)}{what}": value
            for name, values in self._states().items()
            for what, value in values.items()
            if isinstance(value, Tensor)
        }

    def rest(self) -> dict[str, Any]:
        """Return options and names of the groups, and of all ranks' states what is no tensor.

        Collective where the ranks keep different parameters; blocks then.
        """
        others = {
            name: {what: value for what, value in values.items() if not isinstance(value, Tensor)}
            for name, values in self._states().items()
        }
        if isinstance(self._optimizer, ZeroRedundancyOptimizer):
            others = {name: each[name] for each in allgather_object(others) for name in each}
        options = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self._state()["param_groups"]
        ]
        return {"names": self._groups, "options": options, "others": others}

    def empty(self, saved: Mapping[str, Form]) -> dict[str, Tensor]:
        """Return memory for what this rank will keep of the tensors that were saved. Local."""
        prefixes = {_prefix(name): name for name in self._kept}
        found = {}
        for entry, (shape, dtype) in saved.items():
            # What an optimizer keeps has no dot in its name; the names of parameters do.
            start = entry.rpartition(".")[0] + "."
            if start in prefixes:
                found[entry] = torch.empty(shape, dtype=dtype, device="cpu")
        return found

    def load(self, tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> None:
        """Load what `tensors` and `rest` have returned; of the tensors those that this rank keeps. Local.

        Raises: UsageError where the groups have other parameters.
        """
        if rest["names"] != self._groups:
            raise UsageError(
                f"The optimizer has the parameters {_shorten(self._groups)} in its groups, the one that was saved had "
                f"{_shorten(rest['names'])}."
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
        if isinstance(self._optimizer, ZeroRedundancyOptimizer):
            return self._optimizer.sharded_state_dict()
        return self._optimizer.state_dict()

    def _states(self) -> dict[str, dict[str, Any]]:
        """What is kept for each parameter."""
        return {self._names[place]: values for place, values in self._state()["state"].items()}


def _names(parameters: list[Tensor], names: Mapping[Tensor, str]) -> list[str]:
    strangers = [number for number, parameter in enumerate(parameters) if parameter not in names]
    if strangers:
        raise UsageError(
            f"Parameters number {strangers[:5]} of a group of the optimizer are not the model's: a checkpoint knows "
            "them by their names in the model."
        )
    return [names[parameter] for parameter in parameters]


def _prefix(name: str) -> str:
    return f"optimizer.state.{name}."


def _shorten(groups: list[list[str]]) -> str:
    text = str(groups)
    return text if len(text) <= 200 else f"{text[:200]}..."
