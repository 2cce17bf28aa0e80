"""Warnings, and errors of calls in the wrong order: each text names the cause and the fix."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

from hvlike.errors import DataParallelError, UsageError

_MOST_NAMES = 5

DROP = "To drop gradients instead, call optimizer.synchronize() and then optimizer.zero_grad() on every rank."
_EVERY_RANK = "Every rank calls step(): if other ranks have called it here, this one has left it out."
_CHANGE = "Call optimizer.synchronize() before you change gradients, and step under optimizer.skip_synchronize()."

SEVERAL_THREADS = (
    "Without names of its own each one is matched between ranks by the order of the first steps, which differs where "
    "threads run side by side: they would get each other's gradients. Pass "
    "named_parameters=[(f'{model}.{name}', parameter), ...] with names that no other optimizer has, on every rank."
)

ZERO_GRAD_WHILE_REDUCING = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or optimizer.synchronize(). "
    f"This is prohibited as it can cause a race condition. {_EVERY_RANK} {DROP} A backward pass for another optimizer "
    "that comes through these parameters too, as in a GAN, runs inside of optimizer.no_sync()."
)
NO_SYNC_WHILE_REDUCING = (
    "optimizer.no_sync() was entered after loss.backward() but before optimizer.step(). Passes that accumulate locally "
    f"come first, then one outside of no_sync(), then step(). {_EVERY_RANK} {DROP}"
)
# Horovod's warning. The gradients are not reduced again here, so that no run is slower for it.
STEP_AFTER_SYNCHRONIZE = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). "
    "This can cause training slowdown. You may want to consider using optimizer.skip_synchronize() context "
    "if you use optimizer.synchronize() in your code."
)


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


def too_many_passes(name: str, passes: int, *, has_stepped: bool = False) -> UsageError:
    left_over = ""
    if passes > 1 and has_stepped:
        # Earlier groups of passes were full, and zero_grad() drops what is left of one: so step() has been left out.
        count = "1 pass is" if passes == 2 else f"1 to {passes - 1} passes are"
        left_over = (
            f"If you call step() after every {passes} passes, {count} left over from before, as at the end of an epoch "
            f"whose number of batches is not a multiple of {passes}: call step() after its last batch, too. "
        )
    return UsageError(
        f"Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
        f"backward_passes_per_step to accumulate gradients locally. Parameter {name!r} has had {passes} of {passes} "
        f"backward passes and its gradient is being reduced. {left_over}Accumulate under "
        f"optimizer.no_sync() all passes but the last, or call optimizer.step() after each. {DROP}"
    )


def thawed_in_backward(name: str) -> UsageError:
    return UsageError(
        f"Parameter {name!r} started to require a gradient between the first loss.backward() and optimizer.step(). "
        "Change requires_grad after the step, on every rank."
    )


def gradients_disturbed(lost: Sequence[str], replaced: Sequence[str], changed: Sequence[str]) -> UsageError:
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


def came_late(names: Sequence[str]) -> UsageError:
    return UsageError(
        f"Gradients of {list_names(names)} were set after the first gradient of loss.backward() had arrived (with "
        "op=Adasum, inside of the closure), and their parameters were frozen then. The step would use them, and they "
        "are not reduced. Set gradients of frozen parameters before loss.backward(), on every rank, or set them to "
        "None; change requires_grad outside of closures. The reduction of all others was completed, so all ranks can "
        "go on with the next backward pass."
    )


_STEPS_IN_BACKWARD = (
    "Gradients are reduced over the ranks after such hooks, so each rank would step on its own. Call the optimizer's "
    "step() after loss.backward(). A hook that only reads a gradient or changes it in place may stay."
)


def optimizer_in_backward(name: str) -> UsageError:
    return UsageError(
        f"torch.distributed.optim._apply_optimizer_in_backward was applied to parameter {name!r}: its optimizer would "
        f"step inside of loss.backward(). {_STEPS_IN_BACKWARD}"
    )


def used_in_backward(names: Sequence[str]) -> UsageError:
    return UsageError(
        f"Hooks that were registered with register_post_accumulate_grad_hook have changed parameter "
        f"{list_names(names)}, or have taken its gradient away, inside of loss.backward(). {_STEPS_IN_BACKWARD} Ranks "
        "may differ by this pass now: broadcast the parameters of one before you go on."
    )


def inside_no_sync(call: str) -> UsageError:
    return UsageError(
        f"{call} was called inside optimizer.no_sync(), where gradients only accumulate on this rank. Run the last "
        "backward pass and the step outside of it."
    )


def changed_while_reducing(call: str) -> UsageError:
    return UsageError(f"{call} was called after loss.backward() but before optimizer.step(). Call it after the step.")


def unfinished(names: Sequence[str], rank: int, *, interrupted: bool) -> DataParallelError:
    """The next forward pass of a DistributedDataParallel finds that these parameters have received no gradient."""
    text = "Expected to have finished reduction in the prior iteration before starting a new one."
    if interrupted:
        text += " Its backward pass was interrupted by an error."
    if names:
        text += f" Parameters that have received no gradient on rank {rank}: {list_names(names)}."
    if interrupted:
        text += " Call zero_grad() and make this iteration anew."
    else:
        text += (
            " (1) Pass find_unused_parameters=True to DistributedDataParallel where a module does not use all of its "
            "parameters in every iteration; (2) let all outputs of forward take part in the loss."
        )
    return DataParallelError(
        f"{text} The reduction was completed with zeros in their places, so all ranks can go on with this iteration."
    )


def arrived_twice(names: Sequence[str], *, static_graph: bool) -> DataParallelError:
    """Return the error for gradients of a DistributedDataParallel that have arrived too often in one backward pass."""
    if static_graph:
        text = (
            "Your training graph has changed in this iteration, which is not compatible with static_graph=True: "
            f"the gradients of {list_names(names)} have arrived more often than in the first one. Pass "
            "static_graph=False to DistributedDataParallel."
        )
    else:
        text = (
            f"Expected to mark a variable ready only once. The gradients of {list_names(names)} have arrived several "
            "times in one backward pass: parameters that are used in several reentrant checkpoints do so. Pass "
            "static_graph=True to DistributedDataParallel if every iteration uses them in the same way, or "
            "use_reentrant=False to the checkpoints."
        )
    return DataParallelError(f"{text} The reduction was completed, so all ranks can go on with the next iteration.")
