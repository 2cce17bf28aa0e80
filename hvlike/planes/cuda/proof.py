"""A small reduction that shows whether a plane does what it promises, before anybody's gradients take it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvlike.planes.arithmetic import Arithmetic
from hvlike.planes.cuda.device_plane import DevicePlane
from hvlike.planes.ops import ReduceOp
from hvlike.planes.plane import Plane
from hvlike.transport.routine import Routine

_ELEMENTS = 1000


def prove(plane: DevicePlane, place: tuple[int, int], errors: tuple[type[Exception], ...]) -> Routine[str]:
    """Reduce something small on the devices; why that has failed, empty if it has not. A job of the plane; collective.

    place: rank in the group, and its size. errors: what the plane raises where it cannot work.
    """
    rank, size = place
    probe = torch.full((_ELEMENTS,), rank + 1, dtype=torch.int64, device=plane.home)
    seen: list[int] = []

    def look(host: Plane, copies: Sequence[torch.Tensor]) -> Routine[None]:
        seen.extend(value for copy in copies for value in copy.tolist())
        yield from ()

    try:
        yield from plane.allreduce([probe], Arithmetic(torch.int64, ReduceOp.SUM))
    except errors as error:
        return f"{type(error).__name__}: {error}"
    yield from plane.on_host([probe], look)
    expected = size * (size + 1) // 2
    wrong = [value for value in seen if value != expected]
    return f"{wrong[0]} came out of a sum that is {expected}" if wrong else ""
