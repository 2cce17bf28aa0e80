"""Does a GradScaler look at the optimizer right now?

GradScaler searches the gradients for infinities before it calls `optimizer.step()`, and does not call it when it finds
one. On gradients that are not reduced yet, each rank would decide for itself: one would skip the step, the others would
wait in theirs. It offers no hook for this; what it does first is read `optimizer.param_groups`.
"""

from __future__ import annotations

import sys

from torch.amp import GradScaler


def is_read_by_grad_scaler() -> bool:
    """True if `param_groups` is being read in a method of a GradScaler; to be called in `before_groups_are_read`."""
    # Frames: this function, before_groups_are_read, param_groups, the reader.
    try:
        reader = sys._getframe(3)
    except ValueError:
        return False
    return isinstance(reader.f_locals.get("self"), GradScaler)
