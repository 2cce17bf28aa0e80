"""allgather, and the rows that it gathers and reducescatter reduces: each is the derivative of the other.

    gather_rows   y[r] = x[0] over x[1] over ...                on every rank r
    reduce_rows   y[r] = c * op over s of (p * x[s][rows of r])

With L = sum over ranks of L[r](y[r]):

    gather_rows                dL/dx[s] = sum over r of dL[r]/dy[r][rows of s]              reduce_rows by Sum
    reduce_rows Sum, Average   dL/dx[s] = c p (dL[0]/dy[0] over dL[1]/dy[1] over ...)       gather_rows
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvlike.backends.arithmetic.reduce_op import op_name
from hvlike.collectives.requests.process_set import ProcessSet
from hvlike.collectives.requests.reduction import Adasum, Average, Reduction, Sum
from hvlike.collectives.requests.request import Handle, Request, listed, needs_gradient, spec_of, synchronize
from hvlike.collectives.session.context import Call, begin
from hvlike.errors import UsageError

Rows = tuple[int, ...]  # How many rows belong to each rank


def allgather(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet | None = None) -> torch.Tensor:
    """Concatenate the tensors of all ranks along dimension 0.

    Collective: every rank of the set calls it, in any order, under the same name. Blocks until done.

    Args:
        tensor: Shape (N, ...), any strides and dtype. N may differ between ranks and be 0; the other dimensions and the
            dtype may not differ. A 0-dim tensor counts as one row.
        name: Matches calls between ranks: a call on one rank meets those of the same name on the others. Default:
            numbered by the order of unnamed calls of this kind.
        process_set: The ranks to run among. Default: all ranks.

    Returns:
        A new tensor of shape (sum of N, ...): the rows of all ranks, in rank order.

    Raises:
        ShapeMismatchError: On every rank, if the dimensions after the first differ; the job can go on.
        MismatchError: On every rank, if dtypes differ.
        UsageError: On this rank alone, for an argument that cannot be meant (a ValueError).
        PeerLeftError: If a rank of the set has ended its program; ShutdownError, if it has called shutdown().

    Example:
        >>> everybody = hvd.allgather(torch.tensor([hvd.rank()]))

    Gradient: The sum over all ranks of the gradients of this rank's rows.
    Source: MPI 4.1 section 6.7; horovod.torch.allgather.
    """
    return gather_rows(begin("allgather", name, process_set), [tensor])[0]


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet | None = None) -> Handle:
    """Start `allgather`. No gradient. Collective, as `allgather`; does not block.

    Args:
        tensor: As in `allgather`. Leave it alone until `synchronize` returns.
        name: As in `allgather`.
        process_set: The ranks to run among. Default: all ranks.

    Returns:
        A handle; `synchronize(handle)` returns the new tensor.

    Raises:
        UsageError: As `allgather`. All other errors of `allgather` are raised by `synchronize`.
    """
    return start_gather(begin("allgather", name, process_set), [tensor])


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet | None = None
) -> list[torch.Tensor]:
    """`allgather` of several tensors at once, all or none of them. Collective; blocks.

    Args:
        tensors: A non-empty sequence of tensors as in `allgather`; dtypes and shapes may be mixed.
        name: As in `allgather`.
        process_set: The ranks to run among. Default: all ranks.

    Returns:
        A list of new tensors, in the order of `tensors`.

    Raises:
        HorovodInternalError, UsageError: As `allgather`.

    Gradient: As `allgather`, grouped.
    Source: horovod.torch.grouped_allgather.
    """
    return gather_rows(begin("grouped_allgather", name, process_set), listed("grouped_allgather", tensors))


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet | None = None
) -> Handle:
    """Start `grouped_allgather`. No gradient. Collective, as `grouped_allgather`; does not block.

    Args:
        tensors: A non-empty sequence of tensors as in `allgather`; dtypes and shapes may be mixed. Leave them
            alone until `synchronize` returns.
        name: As in `allgather`.
        process_set: The ranks to run among. Default: all ranks.

    Returns:
        A handle; `synchronize(handle)` returns the list of new tensors.

    Raises:
        UsageError: As `allgather`. All other errors of `allgather` are raised by `synchronize`.
    """
    return start_gather(begin("grouped_allgather", name, process_set), listed("grouped_allgather", tensors))


def start_gather(
    call: Call, tensors: Sequence[torch.Tensor], *, detail: Any = None, with_rows: bool = False, wake: bool = True
) -> Handle:
    """Start concatenating rows; with_rows: the handle returns pairs of a tensor and the rows of each rank in it."""
    spec = spec_of("allgather", call.what, call.name, tensors, detail=detail)
    # Groups and sparse tensors have names of their own.
    is_one = call.what == "allgather"
    key = call.name if is_one else f"{call.what}.{call.name}"
    finish = _with_rows if with_rows else _gathered if is_one else _all_gathered
    return call.set_state.controller.submit(spec, key, tensors, finish, wake=wake)


def _gathered(request: Request) -> torch.Tensor:
    output: torch.Tensor = request.outputs[0][0]
    return output.to(request.tensors[0].device)


def _all_gathered(request: Request) -> list[torch.Tensor]:
    return [output for output, _ in _with_rows(request)]


def _with_rows(request: Request) -> list[tuple[torch.Tensor, Rows]]:
    pairs = zip(request.tensors, request.outputs, strict=True)
    return [(output.to(tensor.device), rows) for tensor, (output, rows) in pairs]


def start_reduce(
    call: Call,
    tensors: Sequence[torch.Tensor],
    reduction: Reduction,
    *,
    rows: Sequence[Rows] | None = None,
    wake: bool = True,
) -> Handle:
    """Start reducing rows; rows: those of each rank for each tensor, None to divide them evenly."""
    if reduction.op is Adasum:
        raise UsageError(
            f"{call.what} {call.name!r}: op Adasum is not defined on rows; possible: Average, Sum, Min, Max, Product."
        )
    rows_of_each = None if rows is None else tuple(rows)
    spec = spec_of("reducescatter", call.what, call.name, tensors, reduction=reduction, detail=rows_of_each)
    for index, tensor in enumerate(tensors):
        if tensor.dim() == 0:
            which = repr(call.name) if len(tensors) == 1 else f"{call.name!r} (tensor {index})"
            raise UsageError(
                f"{call.what} {which}: Reducescatter does not support scalar inputs; expected at least one dimension, "
                "got shape []. Use hvd.allreduce."
            )

    is_one = call.what == "reducescatter"
    key = call.name if is_one else f"{call.what}.{call.name}"
    return call.set_state.controller.submit(spec, key, tensors, _reduced if is_one else _all_reduced, wake=wake)


def _reduced(request: Request) -> torch.Tensor:
    output: torch.Tensor = request.outputs[0]
    return output.to(request.tensors[0].device)


def _all_reduced(request: Request) -> list[torch.Tensor]:
    return [output.to(tensor.device) for tensor, output in zip(request.tensors, request.outputs, strict=True)]


def gather_rows(call: Call, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Concatenate the rows of all ranks; recorded by autograd where a gradient may be asked for."""
    if needs_gradient(tensors):
        return list(_gather(call, *tensors))
    result = synchronize(start_gather(call, tensors, wake=False))
    return [result] if call.what == "allgather" else result


def reduce_rows(
    call: Call, tensors: Sequence[torch.Tensor], reduction: Reduction, rows: Sequence[Rows] | None = None
) -> list[torch.Tensor]:
    """Reduce and keep the rows of this rank; recorded by autograd where a gradient may be asked for."""
    if needs_gradient(tensors):
        return list(_reduce(call, reduction, rows, *tensors))
    result = synchronize(start_reduce(call, tensors, reduction, rows=rows, wake=False))
    return [result] if call.what == "reducescatter" else result


def _like(call: Call, kind: str) -> str:
    return f"grouped_{kind}" if call.what.startswith("grouped_") else kind


def _smooth(ctx: Any, outputs: Sequence[torch.Tensor]) -> None:
    """Only numbers that are not whole have gradients."""
    ctx.smooth = [index for index, each in enumerate(outputs) if each.is_floating_point() or each.is_complex()]
    ctx.mark_non_differentiable(*(each for index, each in enumerate(outputs) if index not in ctx.smooth))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: torch.Tensor) -> Any:
        pairs: list[tuple[torch.Tensor, Rows]] = synchronize(start_gather(call, tensors, with_rows=True, wake=False))
        ctx.call = call
        ctx.rows = [rows for _, rows in pairs]
        ctx.shapes = [tensor.shape for tensor in tensors]
        _smooth(ctx, [output for output, _ in pairs])
        return tuple(output for output, _ in pairs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Collective like the forward call: all ranks of the set run backward."""
        incoming = [gradients[index] for index in ctx.smooth]
        rows = [ctx.rows[index] for index in ctx.smooth]
        found = reduce_rows(
            ctx.call.another(_like(ctx.call, "reducescatter"), "gradient"), incoming, Reduction(Sum, 1.0, 1.0), rows
        )
        # A 0-dim tensor has given one row.
        mine = {index: each.reshape(ctx.shapes[index]) for index, each in zip(ctx.smooth, found, strict=True)}
        return (None, *(mine.get(index) for index in range(len(gradients))))


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, reduction: Reduction, rows: Sequence[Rows] | None, *tensors: torch.Tensor) -> Any:
        result = synchronize(start_reduce(call, tensors, reduction, rows=rows, wake=False))
        outputs: list[torch.Tensor] = [result] if call.what == "reducescatter" else result
        ctx.call, ctx.reduction = call, reduction
        _smooth(ctx, outputs)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        call, reduction = ctx.call, ctx.reduction
        if reduction.op not in (Sum, Average):
            raise UsageError(
                f"{call.what} {call.name!r} with op {op_name(reduction.op)} has no gradient; Sum and Average have. "
                "Use hvd.allreduce and take the rows of this rank from its result."
            )
        gathered = gather_rows(
            call.another(_like(call, "allgather"), "gradient"), [gradients[index] for index in ctx.smooth]
        )
        divisor = call.set_state.group.size if reduction.op is Average else 1
        factor = reduction.prescale * reduction.postscale / divisor
        whole = dict(zip(ctx.smooth, gathered, strict=True))
        found = (whole[index] * factor if index in whole else None for index in range(len(gradients)))
        return (None, None, None, *found)


_gather: Callable[..., tuple[torch.Tensor, ...]] = _Gather.apply
_reduce: Callable[..., tuple[torch.Tensor, ...]] = _Reduce.apply
