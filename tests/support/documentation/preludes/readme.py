"""What README.md leaves to the reader."""

import torch
from support.documentation.things import Net, loss_of
from torch.utils.data import TensorDataset

data = TensorDataset(torch.randn(70, 8), torch.randint(3, (70,)))
