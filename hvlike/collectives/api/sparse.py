"""Allreduce of sparse tensors: an allgather of indices and values, summed locally."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hvlike.backends.arithmetic.reduce_op import ReduceOp, check_supported, op_name, reduce_op
from hvlike.collectives.api.gather_scatter import start_gather
from hvlike.collectives.persistent.bucket import ReductionSettings
from hvlike.collectives.requests.process_set import ProcessSet
from hvlike.collectives.requests.reduction import Average, Sum
from hvlike.collectives.session.context import BegunCall, begin
from hvlike.errors import UnsupportedOpError, UsageError
from hvlike.transport.memory.own_memory import check_stand_in
from hvlike.untraced import untraced


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None = None, op: int = Average, process_set: ProcessSet | None = None
) -> Callable[[], torch.Tensor]:
    """Start the sum of sparse tensors over ranks. No gradient. Does not block.

    Collective: every rank of the set calls it, in any order, under the same name.

    Args:
        tensor: Sparse COO, coalesced or not, any dtype on which the op is defined; the same shape, sparse dimensions
            and dtype on every rank, but any number of entries, also none.
        name: Matches calls between ranks. Default: numbered by the order of unnamed calls of this kind.
        op: Average (default) or Sum.
        process_set: The ranks to run among. Default: all ranks.

    Returns:
        A callable that blocks until done and returns a sparse tensor of the same shape with the entries of all ranks in
        rank order, not coalesced. It raises ShapeMismatchError and the other HorovodInternalErrors on every rank.

    Raises:
        UsageError: On this rank alone, for a tensor that is not sparse COO or another op (a ValueError).

    Source: horovod.torch.sparse_allreduce_async.
    """
    call = begin("sparse_allreduce", name, process_set)
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.sparse_coo:
        got = f"layout {tensor.layout}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise UsageError(f"sparse_allreduce {call.name!r}: expected a sparse COO tensor, got {got}; see to_sparse().")
    check_stand_in(f"sparse_allreduce {call.name!r}", tensor)
    reduction = _checked(f"sparse_allreduce {call.name!r}", reduce_op(op))
    try:
        check_supported(reduction, tensor.dtype)
    except UsageError as error:
        raise UsageError(f"sparse_allreduce {call.name!r}: {error}") from None
    size = call.set_state.group.size if reduction is Average else 1

    def scale(values: torch.Tensor) -> torch.Tensor:
        # Whole numbers are truncated toward zero, entry by entry.
        rounding = None if values.is_floating_point() or values.is_complex() else "trunc"
        return values if size == 1 else torch.div(values, size, rounding_mode=rounding)

    return _start(call, tensor.detach(), scale)


def start_sparse_sum(
    tensor: torch.Tensor, name: str, settings: ReductionSettings, process_set: ProcessSet | None
) -> Callable[[], torch.Tensor]:
    """Start gathering; a dense tensor (a stand-in of zeros) contributes nothing. Collective."""
    _checked(f"gradient {name!r}", settings.op)
    own = tensor.detach() if tensor.is_sparse else empty_like_sparse(tensor)
    factor = settings.factor
    result = _start(begin("sparse_allreduce", name, process_set), own.coalesce(), lambda values: values * factor)
    return lambda: result().coalesce()


def empty_like_sparse(tensor: torch.Tensor) -> torch.Tensor:
    """A sparse tensor of one sparse dimension without entries, shaped like a dense one."""
    indices = torch.empty((1, 0), dtype=torch.int64, device=tensor.device)
    values = torch.empty((0, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)
    return torch.sparse_coo_tensor(indices, values, tuple(tensor.shape), check_invariants=False, device=tensor.device)


def _checked(what: str, op: ReduceOp) -> ReduceOp:
    if op not in (Average, Sum):
        raise UnsupportedOpError(f"{what}: op {op_name(op)} is not defined on sparse tensors; possible: Average, Sum.")
    return op


@untraced
def _start(
    call: BegunCall, tensor: torch.Tensor, scale: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[], torch.Tensor]:
    """Gather both parts of a sparse tensor: one row for each entry, so only the first dimension may differ."""
    shape = tensor.shape
    rows = [tensor._indices().t().contiguous(), tensor._values()]
    handle = start_gather(call, rows, detail=tuple(shape))

    def result() -> torch.Tensor:
        indices, values = handle.result()
        # Without checks: torch warns about every sparse tensor that is made without saying whether to check it.
        return torch.sparse_coo_tensor(indices.t(), scale(values), shape, check_invariants=False, device=values.device)

    return result
