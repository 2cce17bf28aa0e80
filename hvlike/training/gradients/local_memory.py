"""What compression has left over on each rank, for elastic.TorchState: taken at a commit, given back to any ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.collectives.requests.process_set import global_process_set
from hvlike.training.gradients.reduction import Reduction


def local_memory(reduction: Reduction) -> dict[str, Any]:
    """Return this rank's place among those that reduce, and what is left over of its gradients. Local."""
    ranks = reduction.process_set or global_process_set
    if not ranks.included():
        return {"process_set": None}
    place = ranks.rank() or 0, ranks.size() or 1
    errors = {} if reduction.memory is None else reduction.memory.errors_of(place)
    return {"process_set": ranks.process_set_id, "rank": place[0], "size": place[1], "errors": errors}


def load_local_memory(reduction: Reduction, states: Mapping[int, dict[str, Any]]) -> dict[str, Any] | None:
    """Go on from what `local_memory` has returned on all ranks; with as many ranks as now, on this one. Local.

    With fewer ranks rank r takes over from the earlier ranks r, r + N, r + 2 N, ...: the sum of what they have left
    over, which for op=Average is made as much as it was in an average over the earlier ranks. So no part of a gradient
    is lost or counted twice.

    Returns:
        The state of the earlier rank of this rank's number; None where this rank does not reduce.
    """
    ranks = reduction.process_set or global_process_set
    rank, size = (ranks.rank() or 0, ranks.size() or 1) if ranks.included() else (0, 0)
    errors: dict[str, Tensor] = {}
    same: dict[str, Any] | None = None
    for state in states.values():
        if not size or state["process_set"] != ranks.process_set_id or state["rank"] % size != rank:
            continue
        factor = size / state["size"] if reduction.op is ReduceOp.AVERAGE else 1.0
        for name, error in state["errors"].items():
            errors[name] = error * factor + errors[name] if name in errors else error * factor
        if state["rank"] == rank:
            same = state
    if reduction.memory is not None:
        reduction.memory.load_errors(errors)
    return same
