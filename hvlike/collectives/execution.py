"""Carrying out what was agreed: verdicts become jobs on a lane, small reductions of one kind fused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch

from hvlike.collectives.agreement import Verdict
from hvlike.collectives.operand import Operand, working_dtype
from hvlike.collectives.reductions import arithmetic_of
from hvlike.collectives.request import Request, Signature
from hvlike.planes.lane import Job, Lanes
from hvlike.planes.ops import ReduceOp
from hvlike.planes.packing import Packer
from hvlike.planes.plane import Plane
from hvlike.transport.loop import Task
from hvlike.transport.routine import Routine

FUSION_BYTES = 64 << 20
"""Reductions announced together are fused up to this many bytes."""

Agreed = tuple[Request, Verdict]


class Executor:
    """Runs the agreed requests of one process set on its lane, in the order they were agreed."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._lane = lanes.first
        self._packer = Packer()

    def run(self, agreed: list[Agreed]) -> None:
        """Start what the coordinator has announced; in the loop."""
        for batch in fuse(agreed, FUSION_BYTES):
            kind = batch[0][0].signature.kind
            if kind == "barrier":
                complete(batch, None)
            else:
                job = self._JOBS[kind](self, batch)
                self._lane.submit(job, partial(complete, batch), wake=False)

    def _allreduce(self, batch: list[Agreed]) -> Job:
        signature = batch[0][0].signature
        op = ReduceOp(signature.op)

        def job(plane: Plane) -> Routine[None]:
            operands = []
            for request, verdict in batch:
                for tensor, strides, alike in zip(
                    request.tensors, request.signature.strides, verdict.extra, strict=True
                ):
                    operands.append(Operand(tensor, strides if alike else None, working_dtype(tensor.dtype, op)))
            for dtype in dict.fromkeys(operand.flat.dtype for operand in operands):
                flats = [operand.flat for operand in operands if operand.flat.dtype is dtype]
                size = self._lane.group.size
                arithmetic = arithmetic_of(dtype, op, size, signature.prescale, signature.postscale)
                yield from self._packer.allreduce(plane, flats, arithmetic)
            for operand in operands:
                operand.write_back()

        return job

    def _broadcast(self, batch: list[Agreed]) -> Job:
        def job(plane: Plane) -> Routine[None]:
            operands = []
            owners = []
            for request, verdict in batch:
                owner = self._lane.group.ranks.index(request.signature.root)
                for tensor, strides, alike in zip(
                    request.tensors, request.signature.strides, verdict.extra, strict=True
                ):
                    operands.append(Operand(tensor, strides if alike else None))
                    owners.append(owner)
            yield from plane.gather([operand.flat.view(torch.uint8) for operand in operands], owners)
            for operand in operands:
                operand.write_back()

        return job

    def _allgather(self, batch: list[Agreed]) -> Job:
        def job(plane: Plane) -> Routine[None]:
            pieces = []
            owners = []
            for request, verdict in batch:
                for index, tensor in enumerate(request.tensors):
                    rows = [lengths[index] for lengths in verdict.extra]
                    output, parts = allocate_gathered(tensor, rows)
                    parts[self._lane.group.rank].copy_(tensor.detach().reshape(parts[self._lane.group.rank].shape))
                    pieces += [part.reshape(-1).view(torch.uint8) for part in parts]
                    owners += list(range(len(parts)))
                    request.outputs.append(output)
            yield from plane.gather(pieces, owners)

        return job

    def _plan(self, batch: list[Agreed]) -> Job:
        request, verdict = batch[0]

        def job(plane: Plane) -> Routine[None]:
            # A job on this lane like any other, so that lanes are opened in the same order everywhere.
            lane = yield from self._lanes.take(verdict.extra.spare_lane)
            request.outputs += [lane, verdict.extra]

        return job

    _JOBS: ClassVar[dict[str, Callable[[Executor, list[Agreed]], Job]]] = {
        "allreduce": _allreduce,
        "broadcast": _broadcast,
        "allgather": _allgather,
        "plan": _plan,
    }


def fuse(agreed: Sequence[Agreed], limit: int) -> list[list[Agreed]]:
    """Join neighbours that one job can do; the same on every rank, as it depends on the announcement alone."""
    batches: list[list[Agreed]] = []
    filled = 0
    for request, verdict in agreed:
        size = sum(tensor.numel() * tensor.element_size() for tensor in request.tensors)
        kind = fusion_kind(request.signature)
        if (
            batches
            and kind is not None
            and kind == fusion_kind(batches[-1][-1][0].signature)
            and filled + size <= limit
        ):
            batches[-1].append((request, verdict))
            filled += size
        else:
            batches.append([(request, verdict)])
            filled = size
    return batches


def fusion_kind(signature: Signature) -> Any:
    """What two requests must have in common to be fused; None for those that never are."""
    if signature.kind == "allreduce":
        return ("allreduce", signature.op, signature.prescale, signature.postscale)
    return signature.kind if signature.kind in ("broadcast", "barrier") else None


def allocate_gathered(tensor: torch.Tensor, rows: Sequence[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Room for the rows of all ranks, in host memory, and the part of each rank in it."""
    rest = tuple(tensor.shape[1:])
    output = torch.empty((sum(rows), *rest), dtype=tensor.dtype)
    return output, list(torch.split(output, list(rows)))


def complete(batch: Sequence[Agreed], task: Task[None] | None) -> None:
    """Tell the callers how it ended."""
    for request, _ in batch:
        error = task.error if task is not None else None
        result = None
        if error is None:
            try:
                result = request.finish(request)
            except Exception as failure:
                error = failure
        request.handle.complete(result, error)
