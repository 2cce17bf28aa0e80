"""Do all ranks hold the same list of things? Asked once before state is broadcast.

The root sends its list, every rank compares it with its own, one flag is reduced. Only where something differs do the
ranks say what: the cost per rank does not grow with their number while all is well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hvlike.collectives.allreduce import allreduce
from hvlike.collectives.lifecycle import rank
from hvlike.collectives.objects import allgather_object, broadcast_object
from hvlike.collectives.process_set import ProcessSet
from hvlike.errors import MismatchError
from hvlike.planes.ops import ReduceOp

_MOST = 3


def check_same(
    what: str, mine: Mapping[str, Any], root_rank: int, process_set: ProcessSet | None, error: type[MismatchError]
) -> None:
    """Check that `mine`, descriptions by name, is the same on all ranks.

    what: for the error, "broadcast_parameters", say. root_rank: global rank the others are compared with.
    Collective over the process set; blocks.
    Raises: `error` on every rank, naming the ranks, the names and both descriptions.
    """
    root: Mapping[str, Any] = broadcast_object(dict(mine), root_rank, process_set=process_set)
    differences = find_differences(root, mine)
    flag = torch.tensor(int(bool(differences)), dtype=torch.int32, device="cpu")
    if not int(allreduce(flag, op=ReduceOp.MAX, process_set=process_set)):
        return
    everybody = allgather_object((rank(), differences), process_set=process_set)
    said = "; ".join(f"rank {number}: {', '.join(found)}" for number, found in everybody if found)
    raise error(
        f"{what}: the ranks do not hold the same as root rank {root_rank}. {said}. Build the same on every rank."
    )


def find_differences(expected: Mapping[str, Any], got: Mapping[str, Any]) -> list[str]:
    """Return a few texts that name what differs; none if all is the same. Pure function."""
    missing = [f"{name!r} is missing" for name in expected if name not in got]
    extra = [f"{name!r} exists only here" for name in got if name not in expected]
    changed = [
        f"{name!r}: expected {expected[name]}, got {got[name]}"
        for name in expected
        if name in got and expected[name] != got[name]
    ]
    found = [*changed, *missing, *extra]
    return found if len(found) <= _MOST else [*found[:_MOST], f"and {len(found) - _MOST} more"]
