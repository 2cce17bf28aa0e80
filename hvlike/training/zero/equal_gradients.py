"""Whether somebody has averaged the gradients that a ZeroRedundancyOptimizer takes as it finds them."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from hvlike.collectives.allreduce import allreduce
from hvlike.collectives.process_set import ProcessSet
from hvlike.planes.ops import ReduceOp
from hvlike.training.fingerprints import fingerprints

_log = logging.getLogger("hvlike")


def compare(name: str, gradients: Sequence[Tensor | None], process_set: ProcessSet | None, *, warns: bool) -> None:
    """Warn where the gradients of the ranks differ: each would be updated with those of its owner alone.

    name: of the optimizer, the same on every rank. warns: this rank says it. Sparse gradients are not looked at.
    Collective over the process set; blocks. Ranks that have joined are not asked.
    """
    dense = [each for each in gradients if each is not None and not each.is_sparse]
    mine = zlib.crc32(repr(fingerprints(dense)).encode())
    extremes = torch.tensor([mine, -mine], dtype=torch.int64, device="cpu")
    both = allreduce(extremes, op=ReduceOp.MAX, name=f"{name}.are gradients equal", process_set=process_set)
    highest, lowest = both.tolist()
    if warns and highest != -lowest:
        _log.warning(
            "the gradients differ between the ranks in the first step of a ZeroRedundancyOptimizer, so each parameter "
            "is updated with those of one rank alone. Wrap the model in hvlike.nn.DistributedDataParallel, or pass "
            "reduce_gradients=True."
        )
