"""What a ZeroRedundancyOptimizer says to calls in the wrong order: each text names the cause and the fix."""

from __future__ import annotations

from hvlike.errors import UsageError


def not_consolidated(rank: int, why: str) -> RuntimeError:
    """state_dict() where the state of the other ranks cannot be had."""
    return RuntimeError(
        "Optimizer state has not been consolidated on this rank. Please call "
        f"`consolidate_state_dict(to={rank})` on all ranks beforehand if you meant to save the global state. {why}"
    )


def joined_before_step() -> UsageError:
    """The body of a Join context ends between the reduction and the step."""
    return UsageError(
        "ZeroRedundancyOptimizer: the body of the Join context has ended after gradients were reduced (by "
        "hvlike.clip_grad_norm_ or a GradScaler) and before step(). Call step() or zero_grad() first."
    )


def not_copied() -> UsageError:
    """A copy would need the other ranks."""
    return UsageError(
        "A ZeroRedundancyOptimizer cannot be copied or pickled: it belongs to ranks that work together. Save "
        "state_dict() after consolidate_state_dict(), make another one on every rank and load it there."
    )


def group_in_join_context() -> UsageError:
    """Ranks that are absent would not know of it."""
    return UsageError(
        "ZeroRedundancyOptimizer.add_param_group() was called inside a Join context, where ranks may be absent. Add "
        "the group on every rank before or after it."
    )


def one_group_only() -> RuntimeError:
    """Groups cannot be added where buckets are dealt."""
    return RuntimeError("ZeroRedundancyOptimizer with `overlap_with_ddp=True` only supports a single parameter group")


def backward_after_reduction() -> UsageError:
    """Gradients have arrived beside those that are reduced already."""
    return UsageError(
        "ZeroRedundancyOptimizer: a backward pass ran after the gradients were reduced (by hvlike.clip_grad_norm_ or a "
        "GradScaler) and before step(). Run all backward passes of a step first, then clip, then step; to start anew "
        "call optimizer.zero_grad()."
    )


def not_reducing(call: str) -> UsageError:
    """A call that makes sense only where the optimizer owns the reduction."""
    return UsageError(
        f"{call} expects a ZeroRedundancyOptimizer with reduce_gradients=True. Where DistributedDataParallel reduces, "
        "gradients are complete after backward(): use torch.nn.utils.clip_grad_norm_."
    )


def scaler_with_absent_ranks() -> UsageError:
    """A GradScaler has unscaled gradients, but none of those that absent ranks own."""
    return UsageError(
        "ZeroRedundancyOptimizer with reduce_gradients=True cannot use a GradScaler while some ranks are out of data: "
        "nobody unscales their share of the gradients. Reduce with hvlike.nn.DistributedDataParallel instead."
    )
