"""What docs/index.md leaves to the reader."""

import torch
from support.documentation.things import Net, loss_of, make_loader

model = Net()
loader = make_loader()
