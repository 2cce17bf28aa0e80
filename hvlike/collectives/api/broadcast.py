"""broadcast: every rank gets the tensor of one rank. The derivative sums the gradients on that rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvlike.backends.operation import Operation, synchronize
from hvlike.collectives.api.allreduce import allreduce
from hvlike.collectives.api.gradients import Incoming, differentiable, follows_horovod
from hvlike.collectives.requests.message_table import name_ranks
from hvlike.collectives.requests.process_set import ProcessSet
from hvlike.collectives.requests.reduction import Average, Sum
from hvlike.collectives.requests.request import copy_of, first_tensor, needs_gradient, spec_of
from hvlike.collectives.session.context import begin, current
from hvlike.errors import UsageError


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> torch.Tensor:
    """Copy the tensor of `root_rank` into a new tensor on every rank.

    Collective: every rank of the set calls it, in any order, under the same name. Blocks until done.

    Args:
        tensor: Any shape, strides and dtype; the same shape and dtype on every rank. Only the root's values matter.
        root_rank: The rank whose tensor is copied: its rank in the job, also when a process set is given.
        name: Matches calls between ranks. Default: numbered by the order of unnamed calls of this kind.
        process_set: The ranks to run among. Default: all ranks.

    Returns:
        A new tensor like `tensor`, with the root's values.

    Raises:
        UsageError: On this rank alone, for a wrong argument (a ValueError).
        MismatchError: On every rank, if the ranks pass different shapes, dtypes or options; the job can go on.
        PeerLeftError: If a rank of the set has ended its program; ShutdownError, if it has called shutdown().

    Gradient: The sum of all ranks' gradients on the root, zero elsewhere. HVLIKE_GRADIENTS=horovod: their mean.
    Source: MPI 4.1 section 6.4; horovod.torch.broadcast.
    """

    def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [synchronize(_start(copy_of(inputs[0]), root_rank, name, process_set, wake=False))]

    def gradient(incoming: Incoming, _: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        again = None if name is None else f"{name}.gradient"
        group = current().find_set(process_set, "Broadcast").group
        op = Average if follows_horovod("broadcast", group, "1/size of") else Sum
        total = allreduce(incoming[0], name=again, op=op, process_set=process_set)
        # Zeros that still hang on the sum: a second backward is collective too.
        if current().world.rank != root_rank:
            total = total.masked_fill(torch.ones((), dtype=torch.bool, device=total.device), 0)
        return [total]

    return (differentiable(run, gradient, [tensor]) if needs_gradient([tensor]) else run([tensor]))[0]


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> torch.Tensor:
    """`broadcast` into `tensor` on every rank. No gradient. Collective; blocks.

    Args:
        tensor: As in `broadcast`; it is overwritten on all ranks but the root.
        root_rank: The rank whose tensor is copied: its rank in the job, also when a process set is given.
        name: As in `broadcast`.
        process_set: The ranks to run among. Default: all ranks.

    Returns:
        `tensor`.

    Raises:
        HorovodInternalError, UsageError: As `broadcast`.
    """
    result: torch.Tensor = synchronize(_start(tensor, root_rank, name, process_set, wake=False))
    return result


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> Operation:
    """Start `broadcast` into a new tensor. No gradient. Collective, as `broadcast`; does not block.

    Args:
        tensor: As in `broadcast`. It is copied before this returns.
        root_rank: The rank whose tensor is copied: its rank in the job, also when a process set is given.
        name: As in `broadcast`.
        process_set: The ranks to run among. Default: all ranks.

    Returns:
        A handle; `synchronize(handle)` returns the new tensor.

    Raises:
        UsageError: At once, as `broadcast`. All other errors of `broadcast` come from `synchronize`.
    """
    return _start(copy_of(tensor), root_rank, name, process_set)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> Operation:
    """Start `broadcast_`. Collective, as `broadcast_`; does not block.

    Args:
        tensor: As in `broadcast_`. Leave it alone until `synchronize(handle)` has returned it.
        root_rank: The rank whose tensor is copied: its rank in the job, also when a process set is given.
        name: As in `broadcast`.
        process_set: The ranks to run among. Default: all ranks.

    Returns:
        A handle; `synchronize(handle)` returns `tensor`.

    Raises:
        UsageError: At once, as `broadcast`. All other errors of `broadcast` come from `synchronize`.
    """
    return _start(tensor, root_rank, name, process_set)


def _start(
    tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet | None, *, wake: bool = True
) -> Operation:
    _, set_state, full_name, _, _ = begin("broadcast", name, process_set)
    if root_rank not in set_state.group.ranks:
        raise UsageError(
            f"broadcast received invalid root rank {root_rank} for provided process set: {full_name!r} runs among "
            f"{name_ranks(set_state.group.ranks)}."
        )
    spec = spec_of("broadcast", "broadcast", full_name, [tensor], written=True, root=int(root_rank))
    return set_state.controller.submit(spec, full_name, [tensor], first_tensor, wake=wake)
