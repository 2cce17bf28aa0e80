"""Gradient clipping on the gradients of all ranks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from hvlike.errors import UsageError
from hvlike.training.optimizer.distributed import DistributedOptimizer


def clip_grad_norm_(
    optimizer: Optimizer,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Reduce the gradients of a DistributedOptimizer and clip their total norm; a plain optimizer.step() follows.

    Also for a ZeroRedundancyOptimizer with reduce_gradients=True, where each rank holds some of the gradients. The norm
    is taken over all parameters of the optimizer. With a GradScaler call scaler.unscale_(optimizer) before.
    Collective over the optimizer's process set; blocks. Does not reduce again what is reduced already.

    Args:
        optimizer: A DistributedOptimizer, or a ZeroRedundancyOptimizer with reduce_gradients=True.
        max_norm: Gradients are scaled so that their norm is at most this.
        norm_type: Order of the norm, inf for the largest element.
        error_if_nonfinite: Raise RuntimeError where the norm is infinite or not a number.
        foreach: As in torch; a ZeroRedundancyOptimizer does not use it.

    Returns:
        The total norm before clipping, a 0-dim tensor, the same on every rank of the set. With op=Adasum the gradients
        are this rank's, and so is the norm.

    Raises:
        UsageError: The optimizer is not distributed.
        RuntimeError: On every rank: the norm is not finite, with error_if_nonfinite.

    Example:
        loss.backward()
        hvd.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()

    Source: `torch.nn.utils.clip_grad_norm_`.
    """
    # Loaded only here: few programs use it.
    from hvlike.training.zero.optimizer import ZeroRedundancyOptimizer

    if isinstance(optimizer, ZeroRedundancyOptimizer):
        return optimizer._clip_grad_norm(max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)
    if not isinstance(optimizer, DistributedOptimizer):
        raise UsageError(
            "hvlike.clip_grad_norm_ expects the optimizer that hvd.DistributedOptimizer returned, got "
            f"{type(optimizer).__name__}. For one that is not distributed use torch.nn.utils.clip_grad_norm_."
        )
    optimizer._synchronize("hvlike.clip_grad_norm_")
    parameters = [parameter for group in optimizer.wrapped.param_groups for parameter in group["params"]]
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    return norm.detach()
