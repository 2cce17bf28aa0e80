"""The options of parameter groups: learning rates and all else but the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Options = list[dict[str, Any]]


def options_of(groups: Sequence[Mapping[str, Any]]) -> Options:
    """Return everything but the parameters, by group."""
    return [{key: value for key, value in group.items() if key not in _OF_PARAMETERS} for group in groups]


def copy_options(sources: Sequence[Mapping[str, Any]], targets: Sequence[dict[str, Any]]) -> None:
    """Give each target group the options of the source group in its place."""
    for source, target in zip(sources, targets, strict=True):
        for key, value in source.items():
            if key not in _OF_PARAMETERS:
                target[key] = value


_OF_PARAMETERS = ("params", "param_names")
