"""reducescatter: every rank gets its rows of the reduction of all ranks' tensors (allgather.py)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvlike.backends.arithmetic.reduce_op import reduce_op
from hvlike.collectives.api.allgather import reduce_rows, start_reduce
from hvlike.collectives.compression import Compression, CompressorLike, check_compressor
from hvlike.collectives.requests.process_set import ProcessSet
from hvlike.collectives.requests.reduction import Average, Reduction
from hvlike.collectives.requests.request import Handle, listed
from hvlike.collectives.session.context import begin


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
    pairs = [compressor.compress(tensor) for tensor in listed("grouped_reducescatter", tensors)]
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
        call, listed("grouped_reducescatter", tensors), _reduction(op, prescale_factor, postscale_factor)
    )


def _reduction(op: int, prescale_factor: float, postscale_factor: float) -> Reduction:
    return Reduction(reduce_op(op), float(prescale_factor), float(postscale_factor))
