"""Where the tensors of a model are."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hvlike.planes.cuda.runtime import kind_of


def gpu_of(tensors: Iterable[Tensor]) -> torch.device | None:
    """The GPU that these tensors are reduced on: the first one that any is on; None where all are in host memory."""
    return next((tensor.device for tensor in tensors if kind_of(tensor.device)), None)
