"""What docs/autograd.md leaves to the reader."""

from pathlib import Path

import torch
from support.documentation.things import loss_of as cross_entropy
from support.documentation.things import make_loader
from torch import Tensor

import hvlike as hvd
import hvlike.autograd as dist_autograd
from hvlike import rpc
from hvlike.nn import DistributedDataParallel


class Encoder(torch.nn.Sequential):
    """Eight numbers to 32."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(8, 32), torch.nn.ReLU())


class Table(torch.nn.Embedding):
    """Words to 32 numbers each."""

    def __init__(self) -> None:
        super().__init__(10, 32)


class Dense(torch.nn.Linear):
    """32 numbers to three."""

    def __init__(self) -> None:
        super().__init__(32, 3)


def loss_of(output: Tensor) -> Tensor:
    """The loss for some labels."""
    return cross_entropy(output, torch.tensor([0, 1]))


loader = make_loader()
words = torch.tensor([1, 2])
trainers = None
blocks_before = globals().get("blocks_before", -1) + 1
if blocks_before and not rpc.api._is_current_rpc_agent_set():
    # The first block is a whole program, which ends its session.
    rpc.init_rpc(f"worker{hvd.rank()}")
    table = rpc.RemoteModule("worker1", Table)
