"""The parameters of an optimizer dealt to the ranks: who owns which, and where each stands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from hvlike.training.zero.partition import assign


class Shares:
    """The parameters of all groups in the order of a state dict, and the rank of the set that owns each."""

    def __init__(self, groups: Sequence[Mapping[str, Any]], ranks: int) -> None:
        owners = assign([[parameter.numel() for parameter in group["params"]] for group in groups], ranks)
        self.ranks = ranks
        self.parameters: list[Tensor] = [parameter for group in groups for parameter in group["params"]]
        self.owners: list[int] = [owner for group in owners for owner in group]
        self._groups = groups
        self._owners_by_group = owners

    def owned(self, rank: int) -> list[int]:
        """The places in `parameters` of what `rank` owns."""
        return [index for index, owner in enumerate(self.owners) if owner == rank]

    def groups_of(self, rank: int) -> list[dict[str, Any]]:
        """The parameter groups, with all options, reduced to what `rank` owns; some may be empty."""
        return [
            {
                **{key: value for key, value in group.items() if key != "param_names"},
                "params": [each for each, owner in zip(group["params"], owners, strict=True) if owner == rank],
            }
            for group, owners in zip(self._groups, self._owners_by_group, strict=True)
        ]

    def elements(self, rank: int) -> int:
        """How many elements `rank` owns."""
        return sum(self.parameters[index].numel() for index in self.owned(rank))
