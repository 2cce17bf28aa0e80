"""Where the gradients of an optimizer or a module are between backward and step."""

from __future__ import annotations

import enum


class Phase(enum.Enum):
    """Where the gradients are."""

    IDLE = "no backward pass since the last step or zero_grad"
    ACCUMULATING = "local sums of some backward passes, more are to come"
    REDUCING = "some gradients are being reduced over the ranks"
    SYNCHRONIZED = "all gradients are reduced"
