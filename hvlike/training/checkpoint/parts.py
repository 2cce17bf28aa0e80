"""What is put into a checkpoint, and how it gets back into the objects it came from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from hvlike.errors import CheckpointError, UsageError
from hvlike.training.gather_state import gather_optimizer_state
from hvlike.training.optimizer import DistributedOptimizer

_PLAIN = (bool, int, float, complex, str, bytes, Tensor, type(None))


def check_parts(parts: Mapping[str, Any], call: str) -> None:
    """Raise UsageError for a value that could be saved but not be loaded."""
    for name, value in parts.items():
        if not is_stateful(value):
            wrong = _strange(value)
            if wrong is not None:
                raise UsageError(
                    f"{call}: {name} holds a {wrong}, which is no plain value. Pass numbers, strings, tensors, lists "
                    "and dicts of them, or an object with state_dict() and load_state_dict()."
                )


def is_stateful(value: object) -> bool:
    """Whether the value keeps its identity: what is in it is saved and loaded."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def gather(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Bring to rank 0 what is spread over the ranks; returns what `states` needs of it. Collective; blocks."""
    gathered: dict[str, Any] = {}
    for name, value in parts.items():
        if isinstance(value, DistributedOptimizer):
            if "compression" in value.state_dict():
                gathered[name] = gather_optimizer_state(value)
        elif callable(getattr(value, "consolidate_state_dict", None)):
            # A ZeroRedundancyOptimizer: its state_dict() is complete on rank 0 after this.
            value.consolidate_state_dict(to=0)
    return gathered


def states(parts: Mapping[str, Any], gathered: Mapping[str, Any]) -> dict[str, Any]:
    """What is saved of each part, on rank 0. Local."""
    return {
        name: gathered[name] if name in gathered else _unwrapped(value).state_dict() if is_stateful(value) else value
        for name, value in parts.items()
    }


def restore(parts: Mapping[str, Any], saved: dict[str, Any], where: str) -> dict[str, Any]:
    """Load the states into the parts; returns what else was saved. Local.

    Raises: CheckpointError for a part that was not saved; UsageError for one that cannot be loaded into.
    """
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
            # A step that an error has interrupted is forgotten.
            value.abandon()
        _unwrapped(value).load_state_dict(saved[name])
    return {name: value for name, value in saved.items() if name not in parts}


def _unwrapped(value: Any) -> Any:
    """The module inside a DistributedDataParallel: its names then fit the model without it."""
    inner = getattr(value, "module", None)
    wraps = isinstance(value, nn.Module) and type(value).__name__ == "DistributedDataParallel"
    return inner if wraps and isinstance(inner, nn.Module) else value


def _strange(value: Any) -> str | None:
    """The name of a class in there that is not plain."""
    if isinstance(value, _PLAIN):
        return None
    if type(value) in (list, tuple, set):
        return next(filter(None, map(_strange, value)), None)
    if type(value) is dict:
        return next(filter(None, map(_strange, [*value.keys(), *value.values()])), None)
    return type(value).__qualname__
