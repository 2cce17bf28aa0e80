"""What docs/from-torch-rpc.md leaves to the reader."""

import torch
from torch import Tensor

from hvlike import rpc


def squared_sum(weight: rpc.RRef) -> Tensor:
    """A loss, on the worker that has the weight."""
    result: Tensor = weight.to_here().square().sum()
    return result
