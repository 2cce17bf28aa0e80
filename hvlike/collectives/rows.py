"""Gathering rows and reducing them: two operations, each the adjoint of the other.

    gather     y[r] = x[0] over x[1] over ...                on every rank r
    reduce     y[r] = c * op over s of (p * x[s][rows of r])

With L = sum over ranks of L[r](y[r]):

    gather                 dL/dx[s] = sum over r of dL[r]/dy[r][rows of s]              a reduction of rows by Sum
    reduce: Sum, Average   dL/dx[s] = c p (dL[0]/dy[0] over dL[1]/dy[1] over ...)       a gathering of rows
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from hvlike.collectives.handles import Handle, synchronize
from hvlike.collectives.membership import Membership
from hvlike.collectives.process_set import ProcessSet
from hvlike.collectives.reductions import Adasum, Average, Reduction, Sum, check_reduction
from hvlike.collectives.request import Request
from hvlike.collectives.submission import begin, check_tensors, signature_of, submit
from hvlike.errors import UsageError
from hvlike.planes.ops import op_name

Rows = tuple[int, ...]
"""How many rows belong to each rank."""


class Call(NamedTuple):
    """A call that has its number: what it runs in and under which name."""

    what: str
    membership: Membership
    name: str
    process_set: ProcessSet | None
    given_name: str | None

    @classmethod
    def begin(cls, what: str, name: str | None, process_set: ProcessSet | None) -> Call:
        """Number the call before anything can be wrong with it."""
        membership, full_name = begin(what, name, process_set)
        return cls(what, membership, full_name, process_set, name)

    def gradient(self, kind: str) -> Call:
        """The call of another kind that backward makes."""
        what = f"grouped_{kind}" if self.what.startswith("grouped_") else kind
        name = None if self.given_name is None else f"{self.given_name}.gradient"
        return Call.begin(what, name, self.process_set)

    @property
    def key(self) -> str:
        """The name under which the ranks meet; groups and sparse tensors have names of their own."""
        return self.name if self.what in ("allgather", "reducescatter") else f"{self.what}.{self.name}"


def start_gather(
    call: Call,
    tensors: Sequence[torch.Tensor],
    result: Callable[[list[torch.Tensor]], Any],
    *,
    detail: Any = None,
    wake: bool = True,
) -> Handle:
    """Start concatenating the rows of all ranks; `result(outputs)` is what the handle returns.

    detail: what else must be the same on all ranks.
    """
    return _start_gather(call, tensors, lambda pairs: result([output for output, _ in pairs]), detail, wake=wake)


def _start_gather(
    call: Call, tensors: Sequence[torch.Tensor], result: Callable[[list[Any]], Any], detail: Any, *, wake: bool
) -> Handle:
    check_tensors(call.what, call.name, tensors)
    signature = signature_of("allgather", tensors, detail=detail)

    def finish(request: Request) -> Any:
        return result(
            [(output.to(tensor.device), rows) for tensor, (output, rows) in zip(tensors, request.outputs, strict=True)]
        )

    return submit(call.membership, signature, call.key, tensors, finish, wake=wake)


def start_reduce(
    call: Call,
    tensors: Sequence[torch.Tensor],
    reduction: Reduction,
    result: Callable[[list[torch.Tensor]], Any],
    *,
    rows: Sequence[Rows] | None = None,
    wake: bool = True,
) -> Handle:
    """Start reducing rows; rows: those of each rank for each tensor, None to divide them evenly."""
    check_tensors(call.what, call.name, tensors)
    for index, tensor in enumerate(tensors):
        if tensor.dim() == 0:
            which = repr(call.name) if len(tensors) == 1 else f"{call.name!r} (tensor {index})"
            raise UsageError(
                f"{call.what} {which}: Reducescatter does not support scalar inputs; expected at least one dimension, "
                "got shape []. Use hvd.allreduce."
            )
    if reduction.op is Adasum:
        raise UsageError(
            f"{call.what} {call.name!r}: op Adasum is not defined on rows; possible: Average, Sum, Min, Max, Product."
        )
    check_reduction(call.what, call.name, reduction, [tensor.dtype for tensor in tensors])
    signature = signature_of(
        "reducescatter",
        tensors,
        op=int(reduction.op),
        prescale=reduction.prescale,
        postscale=reduction.postscale,
        detail=None if rows is None else tuple(rows),
    )

    def finish(request: Request) -> Any:
        return result([output.to(tensor.device) for tensor, output in zip(tensors, request.outputs, strict=True)])

    return submit(call.membership, signature, call.key, tensors, finish, wake=wake)


def gather(call: Call, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Concatenate the rows of all ranks; recorded by autograd where a gradient may be asked for."""
    if _is_recorded(tensors):
        return list(_gather(call, *tensors))
    result: list[torch.Tensor] = synchronize(start_gather(call, tensors, list, wake=False))
    return result


def reduce(
    call: Call, tensors: Sequence[torch.Tensor], reduction: Reduction, rows: Sequence[Rows] | None = None
) -> list[torch.Tensor]:
    """Reduce and keep the rows of this rank; recorded by autograd where a gradient may be asked for."""
    if _is_recorded(tensors):
        return list(_reduce(call, reduction, rows, *tensors))
    result: list[torch.Tensor] = synchronize(start_reduce(call, tensors, reduction, list, rows=rows, wake=False))
    return result


def _is_recorded(tensors: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(each, torch.Tensor) and each.requires_grad for each in tensors)


def _smooth(ctx: Any, outputs: Sequence[torch.Tensor]) -> None:
    """Only numbers that are not whole have gradients."""
    ctx.smooth = [index for index, each in enumerate(outputs) if each.is_floating_point() or each.is_complex()]
    ctx.mark_non_differentiable(*(each for index, each in enumerate(outputs) if index not in ctx.smooth))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: torch.Tensor) -> Any:
        """Gather, and keep which rows are whose."""
        pairs: list[tuple[torch.Tensor, Rows]] = synchronize(_start_gather(call, tensors, list, None, wake=False))
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
        found = reduce(ctx.call.gradient("reducescatter"), incoming, Reduction(Sum, 1.0, 1.0), rows)
        # A 0-dim tensor has given one row.
        mine = {index: each.reshape(ctx.shapes[index]) for index, each in zip(ctx.smooth, found, strict=True)}
        return (None, *(mine.get(index) for index in range(len(gradients))))


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, reduction: Reduction, rows: Sequence[Rows] | None, *tensors: torch.Tensor) -> Any:
        """Reduce."""
        outputs: list[torch.Tensor] = synchronize(start_reduce(call, tensors, reduction, list, rows=rows, wake=False))
        ctx.call, ctx.reduction = call, reduction
        _smooth(ctx, outputs)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Collective like the forward call: all ranks of the set run backward."""
        call, reduction = ctx.call, ctx.reduction
        if reduction.op not in (Sum, Average):
            raise UsageError(
                f"{call.what} {call.name!r} with op {op_name(reduction.op)} has no gradient; Sum and Average have. "
                "Use hvd.allreduce and take the rows of this rank from its result."
            )
        gathered = gather(call.gradient("allgather"), [gradients[index] for index in ctx.smooth])
        divisor = call.membership.group.size if reduction.op is Average else 1
        factor = reduction.prescale * reduction.postscale / divisor
        whole = dict(zip(ctx.smooth, gathered, strict=True))
        found = (whole[index] * factor if index in whole else None for index in range(len(gradients)))
        return (None, None, None, *found)


_gather: Callable[..., tuple[torch.Tensor, ...]] = _Gather.apply
_reduce: Callable[..., tuple[torch.Tensor, ...]] = _Reduce.apply
