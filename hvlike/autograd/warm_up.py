"""What takes long the first time only."""

from __future__ import annotations

from functools import cache

import torch


@cache
def warm_up() -> None:
    """Let torch import what its first `grad` with given gradients imports: 0.3 s, on a cold disk several seconds.

    Best called before anybody waits for a backward with a limit; later calls do nothing. From any thread.
    """
    leaf = torch.zeros((), device="cpu", requires_grad=True)
    with torch.enable_grad():
        outcome = leaf * 1
    torch.autograd.grad([outcome], [leaf], [torch.zeros((), device="cpu")])
