"""What ranks compare before they open a lane for one purpose. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hvlike.errors import MismatchError

_ABSENT = "nothing"


class LaneProposal(NamedTuple):
    """What one rank says of a planned lane."""

    described: tuple[tuple[str, str], ...]
    """What must be equal on all ranks, in order: what it is, and its value."""
    advice: str
    """How to make it so, for the error."""
    spare_lane: int = -1
    """A lane that an earlier owner on this rank has given back; -1: none."""
    serial: int = -1
    """Number of the agreed lane among the plans of the process set."""
    device: str = ""
    """The kind of the device that the lane needs a plane for; empty for none."""


def merge_lane_proposals(proposals: Sequence[LaneProposal]) -> LaneProposal:
    """The first one's, with the spare lane only where all have the same."""
    first = proposals[0]
    same = all(each.spare_lane == first.spare_lane for each in proposals)
    return first._replace(spare_lane=first.spare_lane if same else -1)


def find_lane_mismatch(name: str, ranks: Sequence[int], proposals: Sequence[LaneProposal]) -> MismatchError | None:
    """The error for descriptions that differ, naming the first thing that does; None when all are equal."""
    first = dict(_everything(proposals[0]))
    for rank, other in zip(ranks, proposals, strict=True):
        if _everything(other) == _everything(proposals[0]):
            continue
        its = dict(_everything(other))
        for key in dict.fromkeys([*first, *its]):
            mine, theirs = first.get(key, _ABSENT), its.get(key, _ABSENT)
            if mine != theirs:
                return MismatchError(
                    f"Mismatched {key} in {name!r}: rank {ranks[0]} has {mine}, rank {rank} has {theirs}. "
                    f"{proposals[0].advice}"
                )
        return MismatchError(
            f"Mismatched order in {name!r}: rank {ranks[0]} lists {', '.join(first)}, rank {rank} lists "
            f"{', '.join(its)}. {proposals[0].advice}"
        )
    return None


def _everything(proposal: LaneProposal) -> tuple[tuple[str, str], ...]:
    return (*proposal.described, ("device", proposal.device)) if proposal.device else proposal.described
