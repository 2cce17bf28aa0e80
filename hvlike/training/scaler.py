"""Does a GradScaler look at the optimizer right now?

GradScaler searches the gradients for infinities before it calls `optimizer.step()`, and does not call it when it finds
one. On gradients that are not reduced yet, each rank would decide for itself: one would skip the step, the others would
wait in theirs. It offers no hook for this; what it does first is read `optimizer.param_groups`.
"""

from __future__ import annotations

import sys

from torch.amp import GradScaler


def is_read_by_grad_scaler() -> bool:
    """True if the property that calls this is being read in a method of a GradScaler."""
    try:
        frame = sys._getframe(2)
    except ValueError:
        return False
    return isinstance(frame.f_locals.get("self"), GradScaler)
