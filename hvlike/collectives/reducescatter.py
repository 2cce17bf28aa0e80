"""reducescatter: every rank gets its rows of the reduction of all ranks' tensors.

y[r] = postscale * op over s of (prescale * x[s][rows of r]); the first ranks have one row more where they are uneven.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvlike.collectives.compression import Compression, CompressorLike, check_compressor
from hvlike.collectives.handles import Handle
from hvlike.collectives.process_set import ProcessSet
from hvlike.collectives.reductions import Average, Reduction
from hvlike.collectives.rows import Call, reduce, start_reduce
from hvlike.errors import UsageError
from hvlike.planes.ops import reduce_op


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

    tensor: (N, ...), any strides, any dtype on which the op is defined; the same shape and dtype on every rank.
    op: Average (default), Sum, Min, Max or Product, with the rules of `allreduce`.
    compression: applied before and after, e.g. Compression.fp16.
    Returns (N // size, ...), with one row more on the first N % size ranks. Collective: every rank of the set calls
    it, in any order, under the same name. Blocks until done.
    Raises: UsageError (a ValueError) on this rank alone, also for a 0-dim tensor; MismatchError, PeerLeftError,
        ShutdownError (all HorovodInternalError) on every rank.
    Gradient: Sum and Average: allgather of the gradients, scaled like the forward. The other ops have none.
    Source: MPI 4.1 section 6.10; horovod.torch.reducescatter.
    """
    call = Call.begin("reducescatter", name, process_set)
    compressor = check_compressor(compression)
    compressed, context = compressor.compress(tensor)
    (reduced,) = reduce(call, [compressed], _reduction(op, prescale_factor, postscale_factor))
    return compressor.decompress(reduced, context)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start `reducescatter`; `synchronize(handle)` returns the result. No gradient. Does not block.

    Leave `tensor` alone until then.
    """
    call = Call.begin("reducescatter", name, process_set)
    return start_reduce(call, [tensor], _reduction(op, prescale_factor, postscale_factor), lambda outputs: outputs[0])


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: CompressorLike = Compression.none,
    op: int = Average,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """`reducescatter` of several tensors at once, never partially; dtypes and shapes may be mixed. Returns a list.

    Raises: UsageError for an empty list; else as `reducescatter`.
    Gradient: as `reducescatter`, grouped.
    """
    call = Call.begin("grouped_reducescatter", name, process_set)
    compressor = check_compressor(compression)
    pairs = [compressor.compress(tensor) for tensor in _listed(tensors)]
    reduction = _reduction(op, prescale_factor, postscale_factor)
    reduced = reduce(call, [pair[0] for pair in pairs], reduction)
    return [compressor.decompress(each, context) for each, (_, context) in zip(reduced, pairs, strict=True)]


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start `grouped_reducescatter`; `synchronize(handle)` returns the list. No gradient. Does not block.

    Leave the tensors alone until then.
    """
    call = Call.begin("grouped_reducescatter", name, process_set)
    return start_reduce(call, _listed(tensors), _reduction(op, prescale_factor, postscale_factor), list)


def _reduction(op: int, prescale_factor: float, postscale_factor: float) -> Reduction:
    return Reduction(reduce_op(op), float(prescale_factor), float(postscale_factor))


def _listed(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    listed = list(tensors)
    if not listed:
        raise UsageError("grouped_reducescatter: expected at least one tensor, got an empty list.")
    return listed
