"""What docs/recipes.md leaves to the reader."""

import os
from pathlib import Path

import torch
from documentation.things import Net, loss_of, make_loader

import hvlike as hvd

make_model = Net
torch.manual_seed(hvd.rank())
loader = make_loader(4)
images, labels = loader[0]
model = Net()
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
epoch = 3
# A scaler starts from a large factor; this loss has been scaled by none.
loss = loss_of(model(images), labels)


def prepare(folder: str) -> None:
    """Downloads nothing."""


# What one rank has written is there.
hvd.barrier()
