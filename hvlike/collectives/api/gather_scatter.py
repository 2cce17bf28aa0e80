"""allgather and reducescatter, and the rows they gather and reduce: each is the derivative of the other.

    gather_rows   y[r] = x[0] over x[1] over ...                on every rank r
    reduce_rows   y[r] = c * op over s of (p * x[s][rows of r])

With L = sum over ranks of L[r](y[r]):

    gather_rows                dL/dx[s] = sum over r of dL[r]/dy[r][rows of s]              reduce_rows by Sum
    reduce_rows Sum, Average   dL/dx[s] = c p (dL[0]/dy[0] over dL[1]/dy[1] over ...)       gather_rows

Horovod's gradient, where it is asked for, is the former divided by the number of ranks, and the latter times that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvlike.backends.arithmetic.reduce_op import op_name
from hvlike.backends.operation import Operation, synchronize
from hvlike.collectives.api.gradients import Incoming, differentiable, follows_horovod
from hvlike.collectives.compression import Compression, CompressorLike, check_compressor
from hvlike.collectives.requests.process_set import ProcessSet
from hvlike.collectives.requests.reduction import Adasum, Average, ScaledOp, Sum, reduction_of
from hvlike.collectives.requests.request import Request, check_before_compression, listed, needs_gradient, spec_of
from hvlike.collectives.session.context import BegunCall, begin
from hvlike.errors import UnsupportedOpError, UsageError

Rows = tuple[int, ...]  # How many rows belong to each rank


def allgather(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet | None = None) -> torch.Tensor:
    """Concatenate the tensors of all ranks along dimension 0.

    Collective: every rank of the set calls it, in any order, under the same name. Blocks until done.

    Args:
        tensor: Shape (N, ...), any strides and dtype. N may differ between ranks and be 0; the other dimensions and the
            dtype may not differ. A 0-dim tensor counts as one row.
        name: Matches calls between ranks. Default: numbered by the order of unnamed calls of this kind.
        process_set: The ranks to run among. Default: all ranks.

    Returns:
        A new tensor of shape (sum of N, ...): the rows of all ranks, in rank order.

    Raises:
        ShapeMismatchError: On every rank, if the dimensions after the first differ; the job can go on.
        MismatchError: On every rank, if dtypes differ.
        UsageError: On this rank alone, for a wrong argument (a ValueError).
        PeerLeftError: If a rank of the set has ended its program; ShutdownError, if it has called shutdown().

    Example:
        >>> everybody = hvd.allgather(torch.tensor([hvd.rank()]))

    Gradient: The sum over all ranks of the gradients of this rank's rows. HVLIKE_GRADIENTS=horovod: their mean.
    Source: MPI 4.1 section 6.7; horovod.torch.allgather.
    """
    return gather_rows(begin("allgather", name, process_set), [tensor])[0]


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet | None = None) -> Operation:
    """Start `allgather`. No gradient. Collective, as `allgather`; does not block.

    Args:
        tensor: As in `allgather`. Leave it alone until `synchronize` returns.
        name: As in `allgather`.
        process_set: The ranks to run among. Default: all ranks.

    Returns:
        A handle; `synchronize(handle)` returns the new tensor.

    Raises:
        UsageError: At once, as `allgather`. All other errors of `allgather` come from `synchronize`.
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


    Gradient: As `allgather`, grouped.
    Source: horovod.torch.grouped_allgather.

    Raises:
        HorovodInternalError, UsageError: As `allgather`.
    """
    return gather_rows(begin("grouped_allgather", name, process_set), listed("grouped_allgather", tensors))


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet | None = None
) -> Operation:
    """Start `grouped_allgather`. No gradient. Collective, as `grouped_allgather`; does not block.

    Args:
        tensors: As in `grouped_allgather`. Leave them alone until `synchronize` returns.
        name: As in `allgather`.
        process_set: The ranks to run among. Default: all ranks.

    Returns:
        A handle; `synchronize(handle)` returns the list of new tensors.

    Raises:
        UsageError: At once, as `allgather`. All other errors of `allgather` come from `synchronize`.
    """
    return start_gather(begin("grouped_allgather", name, process_set), listed("grouped_allgather", tensors))


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
        name: Matches calls between ranks. Default: numbered by the order of unnamed calls of this kind.
        compression: Applied before and after, e.g. Compression.fp16. Default: none.
        prescale_factor: Every rank's tensor is multiplied by it before the reduction.
        postscale_factor: The result is multiplied by it.
        process_set: The ranks to run among. Default: all ranks.

    Returns:
        A new tensor of shape (N / size, ...): this rank's rows of the result. The first N % size ranks get one row
        more.

    Raises:
        UsageError: On this rank alone, for a wrong argument (a ValueError).
        MismatchError: On every rank, if the ranks pass different shapes, dtypes or options; the job can go on.
        PeerLeftError: If a rank of the set has ended its program; ShutdownError, if it has called shutdown().

    Gradient: Sum and Average: allgather of the incoming gradients, with the factors of the forward call; with
    HVLIKE_GRADIENTS=horovod, that times the number of ranks. Other ops: none, backward raises UnsupportedOpError.
    Source: MPI 4.1 section 6.10; horovod.torch.reducescatter.
    """
    call = begin("reducescatter", name, process_set)
    compressor = check_compressor(compression)
    check_before_compression("reducescatter", call.name, [tensor])
    compressed, context = compressor.compress(tensor)
    (reduced,) = reduce_rows(call, [compressed], reduction_of(op, prescale_factor, postscale_factor))
    return compressor.decompress(reduced, context)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Operation:
    """Start `reducescatter`. No gradient. Collective, as `reducescatter`; does not block.

    Args:
        tensor: As in `reducescatter`. Leave it alone until `synchronize` returns.
        op: Average (default), Sum, Min, Max or Product.
        name: As in `reducescatter`.
        prescale_factor: As in `reducescatter`.
        postscale_factor: As in `reducescatter`.
        process_set: The ranks to run among. Default: all ranks.

    Returns:
        A handle; `synchronize(handle)` returns the new tensor.

    Raises:
        UsageError: At once, as `reducescatter`. All other errors of `reducescatter` come from `synchronize`.
    """
    call = begin("reducescatter", name, process_set)
    return start_reduce(call, [tensor], reduction_of(op, prescale_factor, postscale_factor))


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: CompressorLike = Compression.none,
    op: int = Average,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """`reducescatter` of several tensors at once, all or none of them. Collective; blocks.

    Args:
        tensors: A non-empty sequence of tensors as in `reducescatter`; dtypes and shapes may be mixed.
        op: Average (default), Sum, Min, Max or Product.
        name: As in `reducescatter`.
        compression: Applied before and after, e.g. Compression.fp16. Default: none.
        prescale_factor: As in `reducescatter`.
        postscale_factor: As in `reducescatter`.
        process_set: The ranks to run among. Default: all ranks.

    Returns:
        A list of new tensors, in the order of `tensors`.


    Gradient: As `reducescatter`, grouped.
    Source: horovod.torch.grouped_reducescatter.

    Raises:
        HorovodInternalError, UsageError: As `reducescatter`.
    """
    call = begin("grouped_reducescatter", name, process_set)
    compressor = check_compressor(compression)
    given = listed("grouped_reducescatter", tensors)
    check_before_compression("grouped_reducescatter", call.name, given)
    pairs = [compressor.compress(tensor) for tensor in given]
    reduction = reduction_of(op, prescale_factor, postscale_factor)
    reduced = reduce_rows(call, [pair[0] for pair in pairs], reduction)
    return [compressor.decompress(each, context) for each, (_, context) in zip(reduced, pairs, strict=True)]


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Operation:
    """Start `grouped_reducescatter`. No gradient. Collective, as `grouped_reducescatter`; does not block.

    Args:
        tensors: As in `grouped_reducescatter`. Leave them alone until `synchronize` returns.
        op: Average (default), Sum, Min, Max or Product.
        name: As in `reducescatter`.
        prescale_factor: As in `reducescatter`.
        postscale_factor: As in `reducescatter`.
        process_set: The ranks to run among. Default: all ranks.

    Returns:
        A handle; `synchronize(handle)` returns a list of new tensors.

    Raises:
        UsageError: At once, as `reducescatter`. All other errors of `reducescatter` come from `synchronize`.
    """
    call = begin("grouped_reducescatter", name, process_set)
    return start_reduce(
        call, listed("grouped_reducescatter", tensors), reduction_of(op, prescale_factor, postscale_factor)
    )


def start_gather(
    call: BegunCall, tensors: Sequence[torch.Tensor], *, detail: Any = None, with_rows: bool = False, wake: bool = True
) -> Operation:
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
    call: BegunCall,
    tensors: Sequence[torch.Tensor],
    reduction: ScaledOp,
    *,
    rows: Sequence[Rows] | None = None,
    wake: bool = True,
) -> Operation:
    """Start reducing rows; rows: those of each rank for each tensor, None to divide them evenly."""
    if reduction.op is Adasum:
        raise UnsupportedOpError(
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
    return _all_reduced(request)[0]


def _all_reduced(request: Request) -> list[torch.Tensor]:
    return [output.to(tensor.device) for tensor, output in zip(request.tensors, request.outputs, strict=True)]


def gather_rows(call: BegunCall, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Concatenate the rows of all ranks; recorded by autograd where a gradient may be asked for."""
    gathered: list[tuple[Rows, torch.Size]] = []

    def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        pairs = synchronize(start_gather(call, inputs, with_rows=True, wake=False))
        gathered.extend((rows, tensor.shape) for (_, rows), tensor in zip(pairs, inputs, strict=True))
        return [output for output, _ in pairs]

    def gradient(incoming: Incoming, _: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        rows = [gathered[index][0] for index in incoming]
        another = call.another(_like(call, "reducescatter"), "gradient")
        op = Average if follows_horovod(call.what, call.set_state.group, "1/size of") else Sum
        found = reduce_rows(another, list(incoming.values()), ScaledOp(op, 1.0, 1.0), rows)
        # A 0-dim tensor has given one row.
        return [each.reshape(gathered[index][1]) for index, each in zip(incoming, found, strict=True)]

    return differentiable(run, gradient, tensors) if needs_gradient(tensors) else run(tensors)


def reduce_rows(
    call: BegunCall, tensors: Sequence[torch.Tensor], reduction: ScaledOp, rows: Sequence[Rows] | None = None
) -> list[torch.Tensor]:
    """Reduce and keep the rows of this rank; recorded by autograd where a gradient may be asked for."""

    def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        result = synchronize(start_reduce(call, inputs, reduction, rows=rows, wake=False))
        return [result] if call.what == "reducescatter" else result

    def gradient(incoming: Incoming, _: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if reduction.op not in (Sum, Average):
            raise UnsupportedOpError(
                f"{call.what} {call.name!r} with op {op_name(reduction.op)} has no gradient; Sum and Average have. "
                "Use hvd.allreduce and take the rows of this rank from its result."
            )
        gathered = gather_rows(call.another(_like(call, "allgather"), "gradient"), list(incoming.values()))
        size = call.set_state.group.size
        factor = reduction.prescale * reduction.postscale / (size if reduction.op is Average else 1)
        # With rows this is the gradient of an allgather, which is exact.
        if rows is None and follows_horovod(call.what, call.set_state.group, "size times"):
            factor *= size
        return [each * factor for each in gathered]

    return differentiable(run, gradient, tensors) if needs_gradient(tensors) else run(tensors)


def _like(call: BegunCall, kind: str) -> str:
    return f"grouped_{kind}" if call.what.startswith("grouped_") else kind
