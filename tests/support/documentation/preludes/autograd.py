"""What docs/autograd.md leaves to the reader."""

import torch
from support.documentation.things import make_loader

import hvlike as hvd
import hvlike.autograd as dist_autograd
from hvlike import rpc


class Encoder(torch.nn.Sequential):
    """Eight numbers to 32."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(8, 32), torch.nn.ReLU())


loader = make_loader()
blocks_before = globals().get("blocks_before", -1) + 1
if blocks_before and not rpc.api._is_current_rpc_agent_set():
    # The first block is a whole program, which ends its session.
    rpc.init_rpc(f"worker{hvd.rank()}")
