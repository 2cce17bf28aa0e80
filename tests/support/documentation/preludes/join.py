"""What docs/join.md leaves to the reader."""

import torch
from support.documentation.things import Net, make_loader
from support.documentation.things import loss_of as cross_entropy
from torch import Tensor

import hvlike as hvd
from hvlike.join import Join

model = Net()
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
batches = make_loader(2 + hvd.rank())


def loss_of(batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss of a batch."""
    return cross_entropy(model(batch[0]), batch[1])
