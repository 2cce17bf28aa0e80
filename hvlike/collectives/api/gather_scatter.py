"""allgather and reducescatter: each is the derivative of the other.

    allgather       y[r] = x[0] over x[1] over ...                on every rank r
    reducescatter   y[r] = c * op over s of (p * x[s][rows of r])

With L = sum over ranks of L[r](y[r]):

    allgather                    dL/dx[s] = sum over r of dL[r]/dy[r][rows of s]              a reducescatter by Sum
    reducescatter Sum, Average   dL/dx[s] = c p (dL[0]/dy[0] over dL[1]/dy[1] over ...)       an allgather
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from hvlike.backends.arithmetic.reduce_op import op_name, reduce_op
from hvlike.collectives.compression import Compression, CompressorLike, check_compressor
from hvlike.collectives.requests.process_set import ProcessSet
from hvlike.collectives.requests.reduction import Adasum, Average, Reduction, Sum
from hvlike.collectives.requests.request import Handle, Request, synchronize
from hvlike.collectives.session.context import begin
from hvlike.collectives.session.process_set_state import ProcessSetState
from hvlike.collectives.session.submission import spec_of, submit
from hvlike.errors import UsageError

Rows = tuple[int, ...]
"""How many rows belong to each rank."""


class RowsCall(NamedTuple):
    """A call that has its number: what it runs in and under which name."""

    what: str
    set_state: ProcessSetState
    name: str
    process_set: ProcessSet | None
    given_name: str | None

    @classmethod
    def begin(cls, what: str, name: str | None, process_set: ProcessSet | None) -> RowsCall:
        """Number the call before anything can be wrong with it."""
        set_state, full_name = begin(what, name, process_set)
        return cls(what, set_state, full_name, process_set, name)

    def gradient(self, kind: str) -> RowsCall:
        """The call of another kind that backward makes."""
        what = f"grouped_{kind}" if self.what.startswith("grouped_") else kind
        name = None if self.given_name is None else f"{self.given_name}.gradient"
        return RowsCall.begin(what, name, self.process_set)


def start_gather(
    call: RowsCall, tensors: Sequence[torch.Tensor], *, detail: Any = None, with_rows: bool = False, wake: bool = True
) -> Handle:
    """Start concatenating the rows of all ranks. The handle returns a tensor; of an operation on several the list.

    detail: what else must be the same on all ranks. with_rows: the handle returns pairs of a tensor and the rows of
    each rank in it.
    """
    spec = spec_of("allgather", call.what, call.name, tensors, detail=detail)
    # Groups and sparse tensors have names of their own.
    is_one = call.what == "allgather"
    key = call.name if is_one else f"{call.what}.{call.name}"
    finish = _with_rows if with_rows else _gathered if is_one else _all_gathered
    return submit(call.set_state, spec, key, tensors, finish, wake=wake)


def _gathered(request: Request) -> torch.Tensor:
    output: torch.Tensor = request.outputs[0][0]
    return output.to(request.tensors[0].device)


def _all_gathered(request: Request) -> list[torch.Tensor]:
    return [output for output, _ in _with_rows(request)]


def _with_rows(request: Request) -> list[tuple[torch.Tensor, Rows]]:
    pairs = zip(request.tensors, request.outputs, strict=True)
    return [(output.to(tensor.device), rows) for tensor, (output, rows) in pairs]


def start_reduce(
    call: RowsCall,
    tensors: Sequence[torch.Tensor],
    reduction: Reduction,
    *,
    rows: Sequence[Rows] | None = None,
    wake: bool = True,
) -> Handle:
    """Start reducing rows. The handle returns a tensor; of a grouped operation the list.

    rows: those of each rank for each tensor, None to divide them evenly.
    """
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
    return submit(call.set_state, spec, key, tensors, _reduced if is_one else _all_reduced, wake=wake)


def _reduced(request: Request) -> torch.Tensor:
    output: torch.Tensor = request.outputs[0]
    return output.to(request.tensors[0].device)


def _all_reduced(request: Request) -> list[torch.Tensor]:
    return [output.to(tensor.device) for tensor, output in zip(request.tensors, request.outputs, strict=True)]


def gather_rows(call: RowsCall, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Concatenate the rows of all ranks; recorded by autograd where a gradient may be asked for."""
    if torch.is_grad_enabled() and _needs_gradient(tensors):
        return list(_gather(call, *tensors))
    result = synchronize(start_gather(call, tensors, wake=False))
    return [result] if call.what == "allgather" else result


def reduce_rows(
    call: RowsCall, tensors: Sequence[torch.Tensor], reduction: Reduction, rows: Sequence[Rows] | None = None
) -> list[torch.Tensor]:
    """Reduce and keep the rows of this rank; recorded by autograd where a gradient may be asked for."""
    if torch.is_grad_enabled() and _needs_gradient(tensors):
        return list(_reduce(call, reduction, rows, *tensors))
    result = synchronize(start_reduce(call, tensors, reduction, rows=rows, wake=False))
    return [result] if call.what == "reducescatter" else result


def _needs_gradient(tensors: Sequence[Any]) -> bool:
    return any(isinstance(each, torch.Tensor) and each.requires_grad for each in tensors)


def _smooth(ctx: Any, outputs: Sequence[torch.Tensor]) -> None:
    """Only numbers that are not whole have gradients."""
    ctx.smooth = [index for index, each in enumerate(outputs) if each.is_floating_point() or each.is_complex()]
    ctx.mark_non_differentiable(*(each for index, each in enumerate(outputs) if index not in ctx.smooth))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: RowsCall, *tensors: torch.Tensor) -> Any:
        """Gather, and keep which rows are whose."""
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
        found = reduce_rows(ctx.call.gradient("reducescatter"), incoming, Reduction(Sum, 1.0, 1.0), rows)
        # A 0-dim tensor has given one row.
        mine = {index: each.reshape(ctx.shapes[index]) for index, each in zip(ctx.smooth, found, strict=True)}
        return (None, *(mine.get(index) for index in range(len(gradients))))


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: RowsCall, reduction: Reduction, rows: Sequence[Rows] | None, *tensors: torch.Tensor
    ) -> Any:
        """Reduce."""
        result = synchronize(start_reduce(call, tensors, reduction, rows=rows, wake=False))
        outputs: list[torch.Tensor] = [result] if call.what == "reducescatter" else result
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
        gathered = gather_rows(call.gradient("allgather"), [gradients[index] for index in ctx.smooth])
        divisor = call.set_state.group.size if reduction.op is Average else 1
        factor = reduction.prescale * reduction.postscale / divisor
        whole = dict(zip(ctx.smooth, gathered, strict=True))
        found = (whole[index] * factor if index in whole else None for index in range(len(gradients)))
        return (None, None, None, *found)


_gather: Callable[..., tuple[torch.Tensor, ...]] = _Gather.apply
_reduce: Callable[..., tuple[torch.Tensor, ...]] = _Reduce.apply


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
    return gather_rows(RowsCall.begin("allgather", name, process_set), [tensor])[0]


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet | None = None) -> Handle:
    """Start `allgather`. No gradient. Does not block.

    Collective: every rank of the set calls it, in any order, under the same name.

    Args:
        tensor: As in `allgather`. Leave it alone until `synchronize` returns.
        name: Matches calls between ranks: a call on one rank meets those of the same name on the others. Default:
            numbered by the order of unnamed calls of this kind.
        process_set: The ranks to run among. Default: all ranks.

    Returns:
        A handle; `synchronize(handle)` returns the new tensor.

    Raises:
        UsageError: As `allgather`. All other errors of `allgather` are raised by `synchronize`.
    """
    return start_gather(RowsCall.begin("allgather", name, process_set), [tensor])


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet | None = None
) -> list[torch.Tensor]:
    """`allgather` of several tensors at once, all or none of them.

    Collective: every rank of the set calls it, in any order, under the same name. Blocks until done.

    Args:
        tensors: A non-empty sequence of tensors as in `allgather`; dtypes and shapes may be mixed.
        name: Matches calls between ranks: a call on one rank meets those of the same name on the others. Default:
            numbered by the order of unnamed calls of this kind.
        process_set: The ranks to run among. Default: all ranks.

    Returns:
        A list of new tensors, in the order of `tensors`.

    Raises:
        HorovodInternalError: As `allgather`; asynchronous calls raise it in `synchronize`.
        UsageError: As `allgather`.

    Gradient: As `allgather`, grouped.
    Source: horovod.torch.grouped_allgather.
    """
    return gather_rows(RowsCall.begin("grouped_allgather", name, process_set), _listed("grouped_allgather", tensors))


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet | None = None
) -> Handle:
    """Start `grouped_allgather`. No gradient. Does not block.

    Collective: every rank of the set calls it, in any order, under the same name.

    Args:
        tensors: A non-empty sequence of tensors as in `allgather`; dtypes and shapes may be mixed. Leave them
            alone until `synchronize` returns.
        name: Matches calls between ranks: a call on one rank meets those of the same name on the others. Default:
            numbered by the order of unnamed calls of this kind.
        process_set: The ranks to run among. Default: all ranks.

    Returns:
        A handle; `synchronize(handle)` returns the list of new tensors.

    Raises:
        UsageError: As `allgather`. All other errors of `allgather` are raised by `synchronize`.
    """
    return start_gather(RowsCall.begin("grouped_allgather", name, process_set), _listed("grouped_allgather", tensors))


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: CompressorLike = Compression.none,
    op: int = Average,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce over ranks and keep this rank's rows.

    Collective: every rank of the set calls it, in any order, under the same name. Blocks until done.

    Args:
        tensor: Shape (N, ...) with at least one dimension; the same shape and dtype on every rank.
        op: Average (default), Sum, Min, Max or Product.
        name: Matches calls between ranks: a call on one rank meets those of the same name on the others. Default:
            numbered by the order of unnamed calls of this kind.
        compression: Applied before and after, e.g. Compression.fp16. Default: none.
        prescale_factor: Every rank's tensor is multiplied by it before the reduction.
        postscale_factor: The result is multiplied by it.
        process_set: The ranks to run among. Default: all ranks.

    Returns:
        A new tensor of shape (N / size, ...): this rank's rows of the result. The first N % size ranks get one row
        more.

    Raises:
        UsageError: On this rank alone, for an argument that cannot be meant (a ValueError).
        MismatchError: On every rank, if the ranks pass different shapes, dtypes or options; the job can go on.
        PeerLeftError: On every rank that is left, if a rank of the set has ended its program; ShutdownError, if it has
            called shutdown(). These are HorovodInternalErrors.

    Gradient: Sum and Average: allgather of the incoming gradients, with the factors of the forward call. Other ops:
    none, backward raises UsageError.
    Source: MPI 4.1 section 6.10; horovod.torch.reducescatter.
    """
    call = RowsCall.begin("reducescatter", name, process_set)
    compressor = check_compressor(compression)
    compressed, context = compressor.compress(tensor)
    (reduced,) = reduce_rows(call, [compressed], _reduction(op, prescale_factor, postscale_factor))
    return compressor.decompress(reduced, context)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start `reducescatter`. No gradient. Does not block.

    Collective: every rank of the set calls it, in any order, under the same name.

    Args:
        tensor: As in `reducescatter`. Leave it alone until `synchronize` returns.
        op: Average (default), Sum, Min, Max or Product.
        name: Matches calls between ranks: a call on one rank meets those of the same name on the others. Default:
            numbered by the order of unnamed calls of this kind.
        prescale_factor: Every rank's tensor is multiplied by it before the reduction.
        postscale_factor: The result is multiplied by it.
        process_set: The ranks to run among. Default: all ranks.

    Returns:
        A handle; `synchronize(handle)` returns the new tensor.

    Raises:
        UsageError: As `reducescatter`. All other errors of `reducescatter` are raised by `synchronize`.
    """
    call = RowsCall.begin("reducescatter", name, process_set)
    return start_reduce(call, [tensor], _reduction(op, prescale_factor, postscale_factor))


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: CompressorLike = Compression.none,
    op: int = Average,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """`reducescatter` of several tensors at once, all or none of them.

    Collective: every rank of the set calls it, in any order, under the same name. Blocks until done.

    Args:
        tensors: A non-empty sequence of tensors as in `reducescatter`; dtypes and shapes may be mixed.
        op: Average (default), Sum, Min, Max or Product.
        name: Matches calls between ranks: a call on one rank meets those of the same name on the others. Default:
            numbered by the order of unnamed calls of this kind.
        compression: Applied before and after, e.g. Compression.fp16. Default: none.
        prescale_factor: Every rank's tensor is multiplied by it before the reduction.
        postscale_factor: The result is multiplied by it.
        process_set: The ranks to run among. Default: all ranks.

    Returns:
        A list of new tensors, in the order of `tensors`.

    Raises:
        HorovodInternalError: As `reducescatter`; asynchronous calls raise it in `synchronize`.
        UsageError: As `reducescatter`.

    Gradient: As `reducescatter`, grouped.
    Source: horovod.torch.grouped_reducescatter.
    """
    call = RowsCall.begin("grouped_reducescatter", name, process_set)
    compressor = check_compressor(compression)
    pairs = [compressor.compress(tensor) for tensor in _listed("grouped_reducescatter", tensors)]
    reduction = _reduction(op, prescale_factor, postscale_factor)
    reduced = reduce_rows(call, [pair[0] for pair in pairs], reduction)
    return [compressor.decompress(each, context) for each, (_, context) in zip(reduced, pairs, strict=True)]


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start `grouped_reducescatter`. No gradient. Does not block.

    Collective: every rank of the set calls it, in any order, under the same name.

    Args:
        tensors: A non-empty sequence of tensors as in `reducescatter`; dtypes and shapes may be mixed. Leave
            them alone until `synchronize` returns.
        op: Average (default), Sum, Min, Max or Product.
        name: Matches calls between ranks: a call on one rank meets those of the same name on the others. Default:
            numbered by the order of unnamed calls of this kind.
        prescale_factor: Every rank's tensor is multiplied by it before the reduction.
        postscale_factor: The result is multiplied by it.
        process_set: The ranks to run among. Default: all ranks.

    Returns:
        A handle; `synchronize(handle)` returns the list of new tensors.

    Raises:
        UsageError: As `reducescatter`. All other errors of `reducescatter` are raised by `synchronize`.
    """
    call = RowsCall.begin("grouped_reducescatter", name, process_set)
    return start_reduce(
        call, _listed("grouped_reducescatter", tensors), _reduction(op, prescale_factor, postscale_factor)
    )


def _reduction(op: int, prescale_factor: float, postscale_factor: float) -> Reduction:
    return Reduction(reduce_op(op), float(prescale_factor), float(postscale_factor))


def _listed(what: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    listed = list(tensors)
    if not listed:
        raise UsageError(f"{what}: expected at least one tensor, got an empty list.")
    return listed
