"""What docs/zero.md leaves to the reader."""

import torch
from support.documentation.things import Net

import hvlike as hvd
from hvlike.nn import DistributedDataParallel, allreduce_hook
from hvlike.optim import ZeroRedundancyOptimizer, hook_with_zero_step

blocks_before = globals().get("blocks_before", -1) + 1
model = Net()
if blocks_before:
    # The first block wraps the plain model.
    model = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
ranks_that_saved = hvd.size()
# What the other rank has written is there.
hvd.barrier()
