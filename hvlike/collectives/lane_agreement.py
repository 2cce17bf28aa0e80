"""Agreeing with the other ranks on a plan, and on the lane it will run on."""

from __future__ import annotations

from typing import Any

import torch

from hvlike.collectives.membership import Membership
from hvlike.collectives.request import Request, Signature
from hvlike.collectives.submission import submit
from hvlike.planes.lane import Lane


def agree_on_lane(
    membership: Membership, kind: str, name: str, proposal: Any, home: torch.device | None = None
) -> tuple[Lane, Any]:
    """Propose to all ranks; the lane, and what follows from all proposals. Collective; blocks.

    kind: one of PLANNED_KINDS. proposal: with `spare_lane`, which this takes and gives back where it is not used.
    home: the device of this rank, where the lane needs a plane for one.
    Raises: MismatchError, PeerLeftError, ShutdownError.
    """
    lanes = membership.lanes
    proposal = proposal._replace(spare_lane=lanes.propose())
    handle = submit(membership, Signature(kind, detail=proposal), name, [], _outputs_of, wake=False, home=home)
    try:
        lane, agreed = handle.result()
    except BaseException:
        lanes.give_back(proposal.spare_lane)
        raise
    if lane.number != proposal.spare_lane:
        lanes.give_back(proposal.spare_lane)
    return lane, agreed


def _outputs_of(request: Request) -> Any:
    return request.outputs
