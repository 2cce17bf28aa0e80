"""allgather: every rank gets the rows of all, in rank order.

y[r] = x[0] over x[1] over ... on every rank r.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvlike.collectives.handles import Handle
from hvlike.collectives.process_set import ProcessSet
from hvlike.collectives.rows import Call, gather, start_gather
from hvlike.errors import UsageError


def allgather(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet | None = None) -> torch.Tensor:
    """Concatenate the tensors of all ranks along dimension 0.

    tensor: (N, ...), any strides, any dtype of the table; N may differ between ranks and be 0, the other dimensions
        and the dtype may not. A 0-dim tensor counts as one row.
    Returns (sum of N, ...), in rank order. Collective: every rank of the set calls it, in any order, under the same
    name. Blocks until done.
    Raises: UsageError (a ValueError) on this rank alone; ShapeMismatchError, MismatchError, PeerLeftError,
        ShutdownError (all HorovodInternalError) on every rank.
    Gradient: the sum over all ranks of the gradients of this rank's rows.
    Source: MPI 4.1 section 6.7; horovod.torch.allgather.
    """
    return gather(Call.begin("allgather", name, process_set), [tensor])[0]


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet | None = None) -> Handle:
    """Start `allgather`; `synchronize(handle)` returns the result. No gradient. Does not block.

    Leave `tensor` alone until then.
    """
    return start_gather(Call.begin("allgather", name, process_set), [tensor], lambda outputs: outputs[0])


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet | None = None
) -> list[torch.Tensor]:
    """`allgather` of several tensors at once, never partially; dtypes and shapes may be mixed. Returns a list.

    Raises: UsageError for an empty list; else as `allgather`.
    Gradient: as `allgather`, grouped.
    """
    return gather(Call.begin("grouped_allgather", name, process_set), _listed(tensors))


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet | None = None
) -> Handle:
    """Start `grouped_allgather`; `synchronize(handle)` returns the list. No gradient. Does not block.

    Leave the tensors alone until then.
    """
    return start_gather(Call.begin("grouped_allgather", name, process_set), _listed(tensors), list)


def _listed(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    listed = list(tensors)
    if not listed:
        raise UsageError("grouped_allgather: expected at least one tensor, got an empty list.")
    return listed
