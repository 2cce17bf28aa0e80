"""What ZeroRedundancyOptimizer accepts as parameters."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from hvlike.errors import UsageError, WrongTypeError

Parameters: TypeAlias = list[Tensor] | list[dict[str, Any]]


def check_parameters(params: object) -> Parameters:
    """Return the parameters, or their groups, as a list.

    Raises: TypeError for anything but an iterable of tensors or of dicts; UsageError (a ValueError) for an empty one,
    a group without "params", and parameters that are sparse or of several types.
    """
    if isinstance(params, Tensor):
        raise WrongTypeError(f"`params` argument should be an iterable of Tensors, but got {torch.typename(params)}")
    try:
        items: list[Any] = list(params)  # type: ignore[call-overload]  # whatever is no iterable is refused below
    except TypeError as error:
        raise WrongTypeError(
            f"`params` argument should be an iterable of Tensors or dicts, but got {torch.typename(params)}"
        ) from error
    if not items:
        raise UsageError("ZeroRedundancyOptimizer got an empty parameter list")
    if all(isinstance(item, Tensor) for item in items):
        check_type(items)
        return items
    if not all(isinstance(item, dict) for item in items):
        raise WrongTypeError("`params` argument should be an iterable of Tensors or dicts")
    groups = []
    for number, group in enumerate(items):
        if "params" not in group:
            raise UsageError(
                "Each parameter group passed-in via `params` must have a 'params' key mapping to the parameters in the "
                f"group; group {number} has none."
            )
        held = group["params"]
        # A set has no order: torch refuses it with its own text.
        groups.append(dict(group) if isinstance(held, (Tensor, set)) else {**group, "params": list(held)})
    check_type([each for group in groups for each in group["params"] if isinstance(each, Tensor)])
    return groups


def check_type(parameters: list[Tensor]) -> None:
    """Check that all parameters are dense and of one type. Raises: UsageError (a ValueError)."""
    types = list(dict.fromkeys(map(torch.typename, parameters)))
    if any(parameter.layout is not torch.strided for parameter in parameters):
        raise UsageError(
            "ZeroRedundancyOptimizer only supports using the same dense type for all parameters but got "
            f"{next(torch.typename(each) for each in parameters if each.layout is not torch.strided)}"
        )
    if len(types) > 1:
        raise UsageError(
            "ZeroRedundancyOptimizer only supports using the same dense type for all parameters but got both "
            f"{types[0]} and {types[1]}. Make one optimizer for each type."
        )
