"""hvlike.optim: optimizers whose state is spread over the ranks; torch.distributed.optim's names."""

from __future__ import annotations

from hvlike.training.zero.optimizer import ZeroRedundancyOptimizer
from hvlike.training.zero.overlap import hook_with_zero_step, hook_with_zero_step_interleaved

__all__ = ["ZeroRedundancyOptimizer", "hook_with_zero_step", "hook_with_zero_step_interleaved"]
