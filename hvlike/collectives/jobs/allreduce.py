"""The job of allreduce: the tensors of a batch reduced in place, those of one dtype together."""

from __future__ import annotations

from collections.abc import Sequence

from hvlike.collectives.jobs.site import Agreed, Site
from hvlike.collectives.operand import Operand, working_dtype
from hvlike.collectives.reductions import arithmetic_of
from hvlike.planes.adasum import Adasum
from hvlike.planes.cuda.jobs import home_of, in_host_memory
from hvlike.planes.lane import Job
from hvlike.planes.ops import ReduceOp
from hvlike.planes.plane import Plane
from hvlike.transport.routine import Routine


def allreduce_job(site: Site, batch: Sequence[Agreed]) -> Job:
    """Reduce; all requests of the batch have the same op and factors."""
    signature = batch[0][0].signature
    op = ReduceOp(signature.op)

    def job(plane: Plane) -> Routine[None]:
        operands = []
        home = home_of(plane)
        for request, verdict in batch:
            for tensor, strides, alike in zip(request.tensors, request.signature.strides, verdict.extra, strict=True):
                operands.append(Operand(tensor, strides if alike else None, working_dtype(tensor.dtype, op), home))
        for dtype in dict.fromkeys(operand.flat.dtype for operand in operands):
            flats = [operand.flat for operand in operands if operand.flat.dtype is dtype]
            if op is ReduceOp.ADASUM:
                whole = Adasum(site.group.rank, site.group.size, signature.prescale, signature.postscale)
                yield from in_host_memory(plane, flats, whole.allreduce)
                continue
            arithmetic = arithmetic_of(dtype, op, site.group.size, signature.prescale, signature.postscale)
            yield from site.packer.allreduce(plane, flats, arithmetic)
        for operand in operands:
            operand.write_back()

    return job
