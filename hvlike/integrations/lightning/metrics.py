"""Metrics of torchmetrics, gathered from all ranks by hvlike."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from hvlike.collectives import lifecycle
from hvlike.collectives.allgather import allgather


def gather_metrics(module: nn.Module) -> None:
    """Let the metrics in a module look at all ranks when they are computed. Local.

    Those that have a `dist_sync_fn` of their own keep it.
    """
    for metric in module.modules():
        if isinstance(metric, Metric) and metric.dist_sync_fn is None:
            metric.dist_sync_fn = gather_tensors
            metric.distributed_available_fn = has_other_ranks


def has_other_ranks() -> bool:
    """Whether there is anything to gather."""
    return lifecycle.is_initialized() and lifecycle.size() > 1


def gather_tensors(tensor: Tensor, group: Any = None) -> list[Tensor]:
    """Return the tensors of all ranks, in rank order; their shapes may differ, their number of dimensions may not.

    group: ranks of a ProcessSet, None for all. Collective over it; blocks.
    Source: torchmetrics.utilities.distributed.gather_all_tensors.
    """
    shapes = allgather(torch.tensor([tensor.shape], dtype=torch.int64, device="cpu"), process_set=group).tolist()
    elements = allgather(tensor.detach().reshape(-1), process_set=group)
    parts = torch.split(elements, [torch.Size(shape).numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
