"""allgather: every rank gets the rows of all, in rank order.

y[r] = x[0] over x[1] over ... on every rank r.
"""

from __future__ import annotations

from typing import Any

import torch

from hvlike.collectives.handles import Handle, synchronize
from hvlike.collectives.process_set import ProcessSet
from hvlike.collectives.request import Request
from hvlike.collectives.submission import begin, check_tensors, signature_of, submit


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet | None = None) -> Handle:
    """Start concatenating the tensors of all ranks along dimension 0; `synchronize(handle)` returns the result.

    tensor: (N, ...), where N may differ between ranks and be 0; a 0-dim tensor counts as one row.
    The result is (sum of N, ...), in rank order. No gradient. Does not block.
    Collective: every rank of the set calls it, in any order, under the same name.
    Raises: UsageError (a ValueError) on this rank alone; when synchronised: ShapeMismatchError and the other
        HorovodInternalErrors on every rank.
    Source: MPI 4.1 section 6.7; horovod.torch.allgather_async.
    """
    return _start(tensor, name, process_set, wake=True)


def allgather(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet | None = None) -> torch.Tensor:
    """`allgather_async`, and the wait for it."""
    result: torch.Tensor = synchronize(_start(tensor, name, process_set, wake=False))
    return result


def _start(tensor: torch.Tensor, name: str | None, process_set: ProcessSet | None, *, wake: bool) -> Handle:
    membership, full_name = begin("allgather", name, process_set)
    check_tensors("allgather", full_name, [tensor])
    signature = signature_of("allgather", [tensor])

    def finish(request: Request) -> Any:
        gathered: torch.Tensor = request.outputs[0]
        return gathered if tensor.device.type == "cpu" else gathered.to(tensor.device)

    return submit(membership, signature, full_name, [tensor], finish, wake=wake)
