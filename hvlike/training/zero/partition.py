"""The parameters of a ZeroRedundancyOptimizer: what is accepted, and which rank owns which.

Pure functions and plain data; every rank computes the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hvlike.errors import UsageError, WrongTypeError

Parameters: TypeAlias = list[Tensor] | list[dict[str, Any]]


def check_parameters(params: object) -> Parameters:
    """Return the parameters, or their groups, as a list."""
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


def assign_owners(groups: Sequence[Sequence[int]], ranks: int) -> list[list[int]]:
    """Give each parameter, by its number of elements, an owner so that all ranks hold about as many.

    Group by group, the largest parameter first, each goes to the rank that holds least so far, the first of them where
    several do. A group that is added later changes nothing before it.
    Sizes [9, 7, 5, 3] on 2 ranks -> owners [0, 1, 1, 0]: 12 elements each.
    """
    held = [0] * ranks
    result = []
    for sizes in groups:
        owners = [0] * len(sizes)
        for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
            owner = held.index(min(held))
            owners[index] = owner
            held[owner] += sizes[index]
        result.append(owners)
    return result


class Partition:
    """The parameters of all groups in the order of a state dict, and the rank of the set that owns each."""

    def __init__(self, groups: Sequence[Mapping[str, Any]], ranks: int) -> None:
        owners = assign_owners([[parameter.numel() for parameter in group["params"]] for group in groups], ranks)
        self.ranks = ranks
        self.parameters: list[Tensor] = [parameter for group in groups for parameter in group["params"]]
        self.owners: list[int] = [owner for group in owners for owner in group]
        self._groups = groups
        self._owners_by_group = owners

    def owned(self, rank: int) -> list[int]:
        return [index for index, owner in enumerate(self.owners) if owner == rank]

    def groups_of(self, rank: int) -> list[dict[str, Any]]:
        """The parameter groups, with all options and the parameters that `rank` owns; some may be empty."""
        return [
            {
                **{key: value for key, value in group.items() if key != "param_names"},
                "params": [each for each, owner in zip(group["params"], owners, strict=True) if owner == rank],
            }
            for group, owners in zip(self._groups, self._owners_by_group, strict=True)
        ]
