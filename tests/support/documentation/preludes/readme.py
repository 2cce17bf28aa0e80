"""What README.md leaves to the reader."""

import torch
from support.documentation.things import Net, loss_of, make_loader
from torch import Tensor

import hvlike as hvd

Encoder = Net
loader = make_loader()
images, labels = loader[0]
tensor = torch.ones(3)
model = Net()
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
loss = loss_of(model(images), labels)


def train_on(batch: tuple[Tensor, Tensor]) -> None:
    """One step."""
    optimizer.zero_grad()
    loss_of(model(batch[0]), batch[1]).backward()
    optimizer.step()
