"""Data-parallel modules: the names of torch.nn.parallel and of torch's communication hooks."""

from __future__ import annotations

from hvlike.training.ddp.comm_hooks import (
    GradBucket,
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)
from hvlike.training.ddp.data_parallel import DistributedDataParallel
from hvlike.untraced import keep_untraced

__all__ = ["DistributedDataParallel", "GradBucket"]
__all__ += ["allreduce_hook", "bf16_compress_hook", "fp16_compress_hook"]

keep_untraced(globals())
