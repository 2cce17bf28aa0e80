"""alltoall: every rank sends some of its rows to each other.

y[r] = x[0][rows for r] over x[1][rows for r] over ... on rank r. The derivative sends the rows of the gradient back.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from hvlike.backends.operation import Operation, synchronize
from hvlike.collectives.api.gradients import Incoming, differentiable
from hvlike.collectives.requests.process_set import ProcessSet
from hvlike.collectives.requests.request import Request, needs_gradient, spec_of
from hvlike.collectives.session.context import begin
from hvlike.errors import UsageError

Splits = torch.Tensor | Sequence[int]


def alltoall(
    tensor: torch.Tensor, splits: Splits | None = None, name: str | None = None, process_set: ProcessSet | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Send rows of `tensor` to every rank and return the rows that came, in rank order.

    Collective: every rank of the set calls it, in any order, under the same name. Some ranks may pass
    splits and others not. Blocks until done.

    Args:
        tensor: Shape (N, ...), any strides and dtype. N may differ between ranks and be 0; the other dimensions and the
            dtype may not differ.
        splits: How many rows go to each rank of the set, in rank order: a list, or a 1-d int32 or int64 tensor. Rows
            beyond their sum are not sent. Default: equally many to every rank; then N must be divisible by the size of
            the set.
        name: Matches calls between ranks. Default: numbered by the order of unnamed calls of this kind.
        process_set: The ranks to run among. Default: all ranks.

    Returns:
        A tensor with the rows that came. With `splits` a pair: that tensor, and how many rows came from each rank (1-d;
        int32, or the dtype of a tensor of splits).

    Raises:
        UsageError: On this rank alone, for splits that do not fit (a ValueError).
        ShapeMismatchError: On every rank, if the dimensions after the first differ; the job can go on.
        MismatchError: On every rank, if dtypes differ.
        PeerLeftError: If a rank of the set has ended its program; ShutdownError, if it has called shutdown().

    Example:
        >>> rows, counts = hvd.alltoall(tensor, splits=[2, 3])  # 2 ranks

    Gradient: alltoall of the incoming gradient with the received splits; zero for rows that were not sent.
    Source: MPI 4.1 section 6.8; horovod.torch.alltoall.
    """
    sent_shape: list[torch.Size] = []
    counts: list[int] = []

    def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        output, received = synchronize(_start(inputs[0], splits, name, process_set, wake=False))
        sent_shape.append(inputs[0].shape)
        counts.extend(received.tolist())
        return [output, received]

    def gradient(incoming: Incoming, _: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        again = None if name is None else f"{name}.gradient"
        back = alltoall(incoming[0], counts, again, process_set)[0]
        rows, *rest = sent_shape[0]
        return [torch.cat([back, back.new_zeros((rows - len(back), *rest))])]

    output, received = differentiable(run, gradient, [tensor]) if needs_gradient([tensor]) else run([tensor])
    return output if splits is None else (output, received)


def alltoall_async(
    tensor: torch.Tensor, splits: Splits | None = None, name: str | None = None, process_set: ProcessSet | None = None
) -> Operation:
    """Start `alltoall`. No gradient. Collective, as `alltoall`; does not block.

    Args:
        tensor: As in `alltoall`. Leave it alone until `synchronize` returns.
        splits: As in `alltoall`.
        name: As in `alltoall`.
        process_set: The ranks to run among. Default: all ranks.

    Returns:
        A handle; `synchronize(handle)` returns the rows and the counts.

    Raises:
        UsageError: At once, as `alltoall`. All other errors of `alltoall` come from `synchronize`.
    """
    return _start(tensor, splits, name, process_set)


def _start(
    tensor: torch.Tensor, splits: Splits | None, name: str | None, process_set: ProcessSet | None, *, wake: bool = True
) -> Operation:
    _, set_state, full_name, _, _ = begin("alltoall", name, process_set)
    spec = spec_of("alltoall", "alltoall", full_name, [tensor])
    which = f"alltoall {full_name!r}"
    if tensor.dim() == 0:
        raise UsageError(f"{which}: expected at least one dimension, got shape []; a 0-dim tensor has no rows to send.")
    counts = _checked(which, splits, len(tensor), set_state.group.size)
    counts_dtype = splits.dtype if isinstance(splits, torch.Tensor) else torch.int32

    def finish(request: Request) -> Any:
        output, rows = request.outputs
        return output.to(tensor.device), torch.tensor(rows, dtype=counts_dtype, device="cpu")

    # The numbers of rows differ between ranks, so they are no part of what is compared.
    sent = torch.tensor(counts, dtype=torch.int64, device="cpu")
    return set_state.controller.submit(spec, full_name, [tensor, sent], finish, wake=wake)


def _checked(which: str, splits: Splits | None, rows: int, size: int) -> list[int]:
    if splits is None:
        if rows % size:
            raise UsageError(
                f"{which}: splits not provided, but first dimension of tensor is not an even multiple of the number "
                f"of workers. Got {rows} rows for {size} ranks; pass splits=[rows for each rank]."
            )
        return [rows // size] * size
    if isinstance(splits, torch.Tensor):
        if splits.dtype not in (torch.int32, torch.int64) or splits.dim() != 1:
            raise UsageError(
                f"{which}: alltoall expects splits to contain 32-bit integer elements, or 64-bit ones, in one "
                f"dimension; got {splits.dtype} of shape {list(splits.shape)}."
            )
        splits = splits.tolist()
    try:
        counts = [operator.index(each) for each in splits]
    except TypeError:
        raise UsageError(
            f"{which}: alltoall expects splits to contain 32-bit integer elements, or 64-bit ones; got {splits!r}."
        ) from None
    if len(counts) != size:
        raise UsageError(
            f"{which}: Number of entries in splits does not equal number of workers. Got {len(counts)} entries for "
            f"{size} ranks."
        )
    if min(counts) < 0:
        raise UsageError(f"{which}: expected no negative entry in splits, got {counts}.")
    if sum(counts) > rows:
        raise UsageError(
            f"{which}: Sum of splits entries is greater than the first dimension of tensor. Got {counts}, which is "
            f"{sum(counts)}, for {rows} rows."
        )
    return counts
