"""What docs/memory.md leaves to the reader."""

import torch
from support.documentation.things import Net

import hvlike as hvd

my_values = torch.ones(1000, 1000)
model = Net()
