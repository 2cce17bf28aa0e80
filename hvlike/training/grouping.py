"""Which gradients the user wants reduced together: the `groups` and `num_groups` arguments. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor

from hvlike.errors import UsageError
from hvlike.training.misuse import warn_user

Groups: TypeAlias = int | list[list[Tensor]] | None

_EXPECTED = "groups should be a non-negative integer or a list of list of torch.Tensor."


def check_groups(groups: object, num_groups: int = 0) -> Groups:
    """Return the number of groups, the lists of parameters, or None for the library's own choice (also for 0).

    num_groups: Horovod's older name for a number of groups; `groups` wins if both are given.
    Raises: UsageError for anything else, for what is not a tensor, and for a parameter in two groups.
    """
    if num_groups != 0:
        warn_user(
            "Parameter `num_groups` has been replaced by `groups` and will be removed in v0.23.0.", DeprecationWarning
        )
        groups = num_groups if groups is None else groups
    if groups is None:
        return None
    if isinstance(groups, int) and not isinstance(groups, bool):
        if groups < 0:
            raise UsageError(f"{_EXPECTED} Got {groups}.")
        return groups or None
    return _check_lists(groups)


def _check_lists(groups: object) -> list[list[Tensor]]:
    if not isinstance(groups, (list, tuple)) or not all(isinstance(group, (list, tuple)) for group in groups):
        raise UsageError(f"{_EXPECTED} Got {type(groups).__name__}.")
    seen: set[Tensor] = set()
    for number, group in enumerate(groups):
        for parameter in group:
            if not isinstance(parameter, Tensor):
                raise UsageError(
                    "groups must consist of torch.Tensor. "
                    f"Group {number} has an item of type {type(parameter).__name__}."
                )
            if parameter in seen:
                raise UsageError(
                    "A parameter can only appear once in groups. "
                    f"The one of shape {list(parameter.shape)} in group {number} was there before."
                )
            seen.add(parameter)
    return [list(group) for group in groups]


def group_indices(groups: Groups, parameters: Sequence[Tensor]) -> int | list[list[int]] | None:
    """Return `groups` in terms of places in `parameters`; those that are not there (frozen ones) are left out."""
    if not isinstance(groups, list):
        return groups
    places = {parameter: place for place, parameter in enumerate(parameters)}
    found = [[places[parameter] for parameter in group if parameter in places] for group in groups]
    return [group for group in found if group]
