"""What docs/recipes.md leaves to the reader."""

import torch
from support.documentation.things import Net, loss_of, make_loader
from torch import Tensor

import hvlike as hvd

make_model = Net
torch.manual_seed(hvd.rank())
loader = make_loader(4)
images, labels = loader[0]
model = Net()
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
state = {"model": Net().state_dict(), "optimizer": torch.optim.SGD(Net().parameters()).state_dict(), "epoch": 3}
loss = loss_of(model(images), labels)


def prepare(folder: str) -> None:
    """Downloads nothing."""


def train_epoch(model: Net, optimizer: torch.optim.Optimizer, loader: list[tuple[Tensor, Tensor]]) -> None:
    """Some steps."""
    for images, labels in loader:
        optimizer.zero_grad()
        loss_of(model(images), labels).backward()
        optimizer.step()
