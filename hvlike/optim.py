"""hvlike.optim: optimizers whose state is spread over the ranks; torch.distributed.optim's names."""

from hvlike.training.zero.optimizer import ZeroRedundancyOptimizer

__all__ = ["ZeroRedundancyOptimizer"]
