"""Optimizers that spread their state over the ranks: the names of torch.distributed.optim."""

from __future__ import annotations

from hvlike.training.zero.optimizer import ZeroRedundancyOptimizer
from hvlike.training.zero.overlap import hook_with_zero_step, hook_with_zero_step_interleaved
from hvlike.untraced import keep_untraced

__all__ = ["ZeroRedundancyOptimizer", "hook_with_zero_step", "hook_with_zero_step_interleaved"]

keep_untraced(globals())
