"""What docs/ddp.md leaves to the reader."""

import torch
from support.documentation.things import Net as Model
from support.documentation.things import loss_of, make_loader

import hvlike as hvd
from hvlike.nn import DistributedDataParallel

loader = make_loader()
model = DistributedDataParallel(Model())
