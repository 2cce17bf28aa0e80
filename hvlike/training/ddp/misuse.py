"""What DistributedDataParallel says to wrong use: torch's opening words, then the cause and the fix."""

from __future__ import annotations

from collections.abc import Sequence

from hvlike.errors import DataParallelError
from hvlike.training.misuse import list_names

NOT_NEEDED = "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient."


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
