"""Closures of step(): evaluated on one rank's data, answered for all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hvlike.collectives.allreduce import allreduce
from hvlike.collectives.process_set import ProcessSet
from hvlike.planes.ops import ReduceOp


def reduce_loss(loss: Any, op: ReduceOp, process_set: ProcessSet | None) -> Any:
    """Return the loss of all ranks for the loss of this one: a number, or a tensor of one element.

    Optimizers that call the closure several times (L-BFGS) decide by the loss how often; they must decide the same
    on every rank. Anything else (None, a tuple) is returned as it is.
    Collective over the process set; blocks.
    """
    if isinstance(loss, Tensor) and loss.numel() == 1:
        reduced = allreduce(loss.detach().to(torch.float64), op=op, process_set=process_set)
        return reduced.to(loss.dtype)
    if isinstance(loss, (int, float)) and not isinstance(loss, bool):
        return float(allreduce(torch.tensor(loss, dtype=torch.float64, device="cpu"), op=op, process_set=process_set))
    return loss


def after(closure: Callable[[], Any], finish: Callable[[Any], Any]) -> Callable[[], Any]:
    """Return a closure that passes what `closure` returns through `finish`, each time it is evaluated."""

    def evaluate() -> Any:
        return finish(closure())

    return evaluate
