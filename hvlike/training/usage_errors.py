"""Errors of calls in the wrong order: each text names the cause and the fix.

First those of DistributedOptimizer, then of DistributedDataParallel, then of ZeroRedundancyOptimizer.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

from hvlike.errors import DataParallelError, UsageError

_MOST_NAMES = 5

DROP = "To drop gradients instead, call optimizer.synchronize() and then optimizer.zero_grad() on every rank."

_CHANGE = "Call optimizer.synchronize() before you change gradients, and step under optimizer.skip_synchronize()."

STEP_AFTER_SYNCHRONIZE = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). "
    "This can cause training slowdown. You may want to consider using optimizer.skip_synchronize() context "
    "if you use optimizer.synchronize() in your code."
)
"""Horovod's warning. The gradients are not reduced again here, so that no run is slower for it."""


def warn_user(text: str, category: type[Warning]) -> None:
    """Warn at the line of the user's program that led here, however many frames of torch and hvlike lie between."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("hvlike", "torch"):
        frame = frame.f_back
    module = frame.f_globals.get("__name__", "")
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(text, category, frame.f_code.co_filename, frame.f_lineno, module, registry)


def list_names(names: Sequence[str]) -> str:
    """'a', 'b', ... (7 in all)"""
    shown = ", ".join(repr(name) for name in names[:_MOST_NAMES])
    return shown if len(names) <= _MOST_NAMES else f"{shown}, ... ({len(names)} in all)"


def too_many_passes(name: str, passes: int) -> UsageError:
    """A gradient arrived again although it is being reduced already."""
    return UsageError(
        f"Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
        f"backward_passes_per_step to accumulate gradients locally. Parameter {name!r} has had {passes} of {passes} "
        f"backward passes and its gradient is being reduced. Accumulate under optimizer.no_sync() all passes but the "
        f"last, or call optimizer.step() after each; a second DistributedOptimizer that is still alive for the same "
        f"parameters has the same effect. {DROP}"
    )


def zero_grad_while_reducing() -> UsageError:
    """zero_grad() would destroy gradients that are under way."""
    return UsageError(
        "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
        f"optimizer.synchronize(). This is prohibited as it can cause a race condition. {DROP} A backward pass for "
        "another optimizer that comes through these parameters too, as in a GAN, runs inside of optimizer.no_sync()."
    )


def gradients_disturbed(lost: Sequence[str], replaced: Sequence[str], changed: Sequence[str]) -> UsageError:
    """Gradients were taken away, exchanged or changed between backward and step, while they may be under way."""
    text = "Gradients were changed after loss.backward() but before optimizer.step() or optimizer.synchronize()."
    if lost:
        text += (
            f" Those of {list_names(lost)} were set to None: call optimizer.zero_grad() (or model.zero_grad()) "
            "before loss.backward() or after optimizer.step()."
        )
    if replaced:
        text += f" Those of {list_names(replaced)} were replaced by other tensors, which were not reduced. {_CHANGE}"
    if changed:
        text += (
            f" Those of {list_names(changed)} were changed in place on this rank alone (clipped, scaled, set to zero). "
            f"{_CHANGE} To clip, call hvlike.clip_grad_norm_(optimizer, max_norm) and then optimizer.step(). A module "
            "in DistributedDataParallel has its gradients reduced by that: use a plain optimizer with it."
        )
    return UsageError(text + " The reduction was completed, so all ranks can go on with the next backward pass.")


def not_synchronized() -> UsageError:
    """A step on gradients that are still local or under way."""
    return UsageError(
        "optimizer.step() was called under optimizer.skip_synchronize(), but the gradients of the last backward pass "
        "have not been reduced. Call optimizer.synchronize() before, or step without skip_synchronize()."
    )


def nothing_to_skip() -> UsageError:
    """skip_synchronize() where the reduction follows the step."""
    return UsageError(
        "optimizer.skip_synchronize() is not supported with op=hvd.Adasum: what the step has changed is reduced after "
        "it, so there is no earlier synchronization to skip. Call optimizer.step() outside of it; gradients may be "
        "clipped or unscaled before the step without synchronize()."
    )


def inside_no_sync(call: str) -> UsageError:
    """A call that needs reduced gradients where they are kept local."""
    return UsageError(
        f"{call} was called inside optimizer.no_sync(), where gradients only accumulate on this rank. Run the last "
        "backward pass and the step outside of it."
    )


def no_sync_while_reducing() -> UsageError:
    """Local accumulation into gradients that are under way."""
    return UsageError(
        "optimizer.no_sync() was entered after loss.backward() but before optimizer.step(). Passes that accumulate "
        f"locally come first, then one outside of no_sync(), then step(). {DROP}"
    )


def changed_while_reducing(call: str) -> UsageError:
    """A change of what is reduced, between backward and step."""
    return UsageError(f"{call} was called after loss.backward() but before optimizer.step(). Call it after the step.")


def late_parameter(name: str) -> UsageError:
    """A gradient that is not in the plan of this step."""
    return UsageError(
        f"Parameter {name!r} started to require a gradient between the first loss.backward() and optimizer.step(). "
        "Change requires_grad after the step, on every rank."
    )


def joined_while_reducing() -> UsageError:
    """The body of a Join context ended in the middle of a step."""
    return UsageError(
        "The body of the Join context ended after loss.backward() but before optimizer.step(): some gradients are "
        f"being reduced. Call optimizer.step() in the same iteration, on every rank. {DROP}"
    )


def not_distributed(call: str, got: object) -> UsageError:
    """A plain optimizer where a DistributedOptimizer is needed."""
    return UsageError(
        f"{call} expects the optimizer that hvd.DistributedOptimizer returned, got {type(got).__name__}. For one that "
        "is not distributed use torch.nn.utils.clip_grad_norm_."
    )


DDP_NOT_NEEDED = (
    "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient."
)


def not_finished(rank: int, missing: Sequence[str], *, ended: bool) -> DataParallelError:
    """The backward passes of the iteration before have left out parameters; ended: they have come to their ends."""
    cause = "" if ended else " Its backward pass was interrupted by an error."
    return DataParallelError(
        "Expected to have finished reduction in the prior iteration before starting a new one."
        f"{cause} Parameters that have received no gradient on rank {rank}: {list_names(missing)}. (1) Pass "
        "find_unused_parameters=True to DistributedDataParallel where a module does not use all of its parameters in "
        "every iteration; (2) let all outputs of forward take part in the loss. The reduction was completed with zeros "
        "in their places, so all ranks can go on with this iteration."
    )


def ready_twice(names: Sequence[str]) -> DataParallelError:
    """Gradients have arrived several times in one backward pass, where once was expected."""
    return DataParallelError(
        f"Expected to mark a variable ready only once. The gradients of {list_names(names)} have arrived several times "
        "in one backward pass: parameters that are used in several reentrant checkpoints do so. Pass static_graph=True "
        "to DistributedDataParallel if every iteration uses them in the same way, or use_reentrant=False to the "
        "checkpoints. The reduction was completed, so all ranks can go on with the next iteration."
    )


def graph_changed(names: Sequence[str]) -> DataParallelError:
    """The graph is not static."""
    return DataParallelError(
        "Your training graph has changed in this iteration, which is not compatible with static_graph=True: the "
        f"gradients of {list_names(names)} have arrived more often than in the first one. Pass static_graph=False to "
        "DistributedDataParallel. The reduction was completed, so all ranks can go on with the next iteration."
    )


def too_late_for_static_graph() -> DataParallelError:
    """What is counted in the first iteration cannot be counted any more."""
    return DataParallelError(
        "_set_static_graph() was called after the first forward: whether a graph is static is known before it. Call it "
        "right after the constructor, or pass static_graph=True to DistributedDataParallel."
    )


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
    """Groups cannot be added with overlap_with_ddp."""
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
        "their share of the gradients is not unscaled. Reduce with hvlike.nn.DistributedDataParallel instead."
    )
