"""Data parallelism by modules: torch.nn.parallel's names."""

from hvlike.training.ddp.data_parallel import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
