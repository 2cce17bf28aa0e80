"""The step of a ZeroRedundancyOptimizer inside the backward pass of a DistributedDataParallel.

A communication hook is wrapped: as soon as a bucket of gradients is reduced, each rank updates those of its parameters
that are in it, while later buckets are still under way. After the last bucket all ranks get the updated parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from hvlike.errors import UsageError
from hvlike.training.ddp.comm_hooks import GradBucket, Hook, hook_result, split
from hvlike.training.gradients.parameters import temporary_gradients
from hvlike.training.zero.optimizer import ZeroRedundancyOptimizer

WARM_UP = 2  # Backward passes without an update, as in torch, which needs them to fix its buckets


def hook_with_zero_step(
    hook: Hook,
    ddp: torch.nn.Module,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,
    *,
    warm_up: int | None = None,
) -> Hook:
    """Return a communication hook that reduces as `hook` does and makes the step of `zero` after the last bucket.

    Args:
        hook: The hook that reduces a bucket.
        ddp: The DistributedDataParallel it will be registered with.
        zero: Made with overlap_with_ddp=True.
        shard_buckets: Accepted for compatibility with torch and ignored: parameters are assigned to ranks one by one.
        warm_up: Backward passes without an update. Default: as many as in torch, 2, or 3 for a static graph.

    Returns:
        The hook.

    Raises:
        UsageError: (a ValueError) `zero` was not made with overlap_with_ddp=True.

    Source: torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook.
    """
    return _Overlap(hook, ddp, zero, warm_up, interleaved=False)


def hook_with_zero_step_interleaved(
    hook: Hook,
    ddp: torch.nn.Module,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,
    *,
    warm_up: int | None = None,
) -> Hook:
    """Do as `hook_with_zero_step`, but update parameters as soon as their own bucket is reduced.

    Args:
        hook: The hook that reduces a bucket.
        ddp: The DistributedDataParallel it will be registered with.
        zero: Made with overlap_with_ddp=True.
        shard_buckets: Accepted for compatibility with torch and ignored.
        warm_up: Backward passes without an update. Default: as many as in torch, 2, or 3 for a static graph.

    Returns:
        The hook.

    Raises:
        UsageError: (a ValueError) `zero` was not made with overlap_with_ddp=True.
    """
    return _Overlap(hook, ddp, zero, warm_up, interleaved=True)


class _Overlap:
    """The wrapped hook."""

    def __init__(
        self, hook: Hook, ddp: torch.nn.Module, zero: ZeroRedundancyOptimizer, warm_up: int | None, *, interleaved: bool
    ) -> None:
        if not zero.overlaps_with_ddp:
            raise UsageError(
                "ZeroRedundancyOptimizer must be constructed with `overlap_with_ddp=True` to use this hook properly"
            )
        if warm_up is None:
            warm_up = WARM_UP + bool(getattr(ddp, "static_graph", False))
        self._hook = hook
        self._zero = zero
        self._passes_left = warm_up
        self._interleaved = interleaved
        self._started: list[tuple[GradBucket, Any]] = []
        self._reduced: dict[Tensor, Tensor] = {}
        self._failures: list[Exception] = []

    def __call__(self, state: Any, bucket: GradBucket) -> Any:
        pending = self._hook(state, bucket)
        if self._zero.is_absent:
            # The optimizer takes part in the steps of other ranks by itself.
            return pending
        if self._passes_left:
            self._passes_left -= bucket.is_last()
            return pending
        self._started.append((bucket, pending))
        if self._interleaved or bucket.is_last():
            try:
                pending = self._update()
                if bucket.is_last():
                    failures, self._failures = self._failures, []
                    with self._only(self._reduced):
                        self._zero.share({}, failures)
            except BaseException:
                self._started, self._reduced = [], {}
                raise
        if bucket.is_last():
            self._reduced = {}
        return pending

    def _update(self) -> Tensor:
        result = torch.empty(0, device="cpu")
        started, self._started = self._started, []
        for bucket, pending in started:
            result = hook_result(pending)
            if not isinstance(result, Tensor):
                got = type(result).__name__
                raise UsageError(f"hook_with_zero_step: the wrapped hook must return a tensor, got {got}.")
            parameters = bucket.parameters()
            parts = split(result, [each.shape for each in parameters])
            reduced = {each: part for each, part in zip(parameters, parts, strict=True) if each not in bucket.absent}
            with self._only(reduced):
                try:
                    self._zero.step_share(None, {})
                except Exception as error:
                    # The other ranks wait for this one in the buckets that follow, and hear of it after them.
                    self._failures.append(error)
            self._reduced |= reduced
        return result

    def _only(self, gradients: Mapping[Tensor, Tensor]) -> AbstractContextManager[None]:
        return temporary_gradients({parameter: gradients.get(parameter) for parameter in self._zero.parameters})
