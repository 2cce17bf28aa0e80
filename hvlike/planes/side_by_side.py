"""Routines that go on side by side inside one: each as far as it can, until all have ended."""

from __future__ import annotations

from collections.abc import Sequence

from hvlike.transport.routine import Routine, Wait


def side_by_side(routines: Sequence[Routine[None]]) -> Routine[None]:
    """Advance all routines in turn until the last has ended; yields while none can move.

    When one fails, or this one is given up, the others are closed.
    """
    left = list(routines)
    try:
        while left:
            wait = Wait.BELL
            for routine in list(left):
                step = next(routine, None)
                if step is None:
                    left.remove(routine)
                    step = Wait.AGAIN
                wait = max(wait, step)
            if left:
                yield wait
    finally:
        for routine in left:
            routine.close()
