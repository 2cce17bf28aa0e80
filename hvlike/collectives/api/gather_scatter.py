"""allgather and reducescatter: every rank gets the rows of all, or its rows of their reduction (rows.py)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvlike.backends.arithmetic.reduce_op import reduce_op
from hvlike.collectives.api.rows import RowsCall, gather_rows, reduce_rows, start_gather, start_reduce
from hvlike.collectives.compression import Compression, CompressorLike, check_compressor
from hvlike.collectives.requests.process_set import ProcessSet
from hvlike.collectives.requests.reduction import Average, Reduction
from hvlike.collectives.requests.request import Handle
from hvlike.errors import UsageError


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
        name: As in `allgather`.
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
        name: As in `allgather`.
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
        name: As in `allgather`.
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
        name: As in `reducescatter`.
        prescale_factor: As in `reducescatter`.
        postscale_factor: As in `reducescatter`.
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
        name: As in `reducescatter`.
        compression: Applied before and after, e.g. Compression.fp16. Default: none.
        prescale_factor: As in `reducescatter`.
        postscale_factor: As in `reducescatter`.
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
        name: As in `reducescatter`.
        prescale_factor: As in `reducescatter`.
        postscale_factor: As in `reducescatter`.
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
