"""What docs/recipes.md leaves to the reader."""

import torch
from support.documentation.things import Net, loss_of, make_loader
from torch import Tensor

import hvlike as hvd

torch.manual_seed(hvd.rank())
loader = make_loader(5)
images, labels = loader[0]
model = Net()
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
generator, discriminator = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)
for network in (generator, discriminator):
    hvd.broadcast_parameters(network.state_dict(), root_rank=0)
loss = loss_of(model(images), labels)


def prepare(folder: str) -> None:
    """Downloads nothing."""


def train_epoch(model: Net, optimizer: torch.optim.Optimizer, loader: list[tuple[Tensor, Tensor]]) -> None:
    """Some steps."""
    for images, labels in loader:
        optimizer.zero_grad()
        loss_of(model(images), labels).backward()
        optimizer.step()
