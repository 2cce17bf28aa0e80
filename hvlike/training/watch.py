"""Noticing that the parameters of an optimizer are not those of the step before, at little cost in every step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

from torch import Tensor

_lists: Callable[[Mapping[str, Any]], list[Tensor]] = itemgetter("params")
_requires_grad: Callable[[Tensor], bool] = attrgetter("requires_grad")


class Watch:
    """What was seen at the last thorough look: the parameters of the groups and whether they require a gradient.

    A parameter that was moved or converted is not noticed here: its hook is gone, so its gradient does not arrive.
    """

    def __init__(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        self._parameters = _flat(param_groups)
        self._flags = list(map(_requires_grad, self._parameters))

    def sees_change(self, param_groups: Sequence[Mapping[str, Any]]) -> bool:
        """Whether a parameter has come, gone or changed its place, or does or does not require a gradient now."""
        parameters = _flat(param_groups)
        return (
            len(parameters) != len(self._parameters)
            or not all(map(is_, parameters, self._parameters))
            or list(map(_requires_grad, parameters)) != self._flags
        )


def _flat(param_groups: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    return list(chain.from_iterable(map(_lists, param_groups)))
