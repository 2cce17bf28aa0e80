"""The work of each negotiated operation, which an op queue runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from hvlike.backends.adasum import Adasum
from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.backends.base import Backend
from hvlike.backends.cuda.device_backend import beside, home_of, in_host_memory
from hvlike.backends.cuda.runtime import KINDS, runtime_of
from hvlike.backends.fusion_buffer import FusionBuffer
from hvlike.backends.op_queue import OpQueues
from hvlike.collectives.requests.message_table import Response
from hvlike.collectives.requests.reduction import Operand, arithmetic_of, reduce_operands, working_dtype
from hvlike.collectives.requests.request import Request
from hvlike.config import Config
from hvlike.errors import LaunchError
from hvlike.transport.loop.coroutine import Coroutine
from hvlike.transport.world import Group

if TYPE_CHECKING:
    from hvlike.backends.cuda.opening import Choice, DeviceBackends


Agreed = tuple[Request, Response]


@dataclass
class ExecutionSite:
    queues: OpQueues
    knobs: Config
    packer: FusionBuffer = field(default_factory=FusionBuffer)
    _devices: DeviceBackends | None = None

    @property
    def group(self) -> Group:
        return self.queues.first.group

    @property
    def devices(self) -> DeviceBackends:
        """What opens backends for tensors of a GPU; nothing of it is imported before the first one comes."""
        if self._devices is None:
            from hvlike.backends.cuda.opening import DeviceBackends

            self._devices = DeviceBackends(self.group, self.knobs, self.group.world.host)
        return self._devices

    @property
    def device_choice(self) -> Choice | None:
        """The backend that was chosen for them, and why; None before the first one."""
        return None if self._devices is None else self._devices.choice

    def close(self) -> None:
        if self._devices is not None:
            self._devices.close()


def run_allgather(site: ExecutionSite, batch: Sequence[Agreed], backend: Backend) -> Coroutine[None]:
    """Gather; the outputs of a request are pairs of a tensor and the rows that each rank has in it."""
    pieces: list[torch.Tensor] = []
    home = (home_of(backend) or "cpu") if batch[0][0].spec.device in KINDS else "cpu"
    group = site.queues.first.group
    for request, response in batch:
        for tensor, rows in zip(request.tensors, zip(*response.extra, strict=True), strict=True):
            output = torch.empty((sum(rows), *tensor.shape[1:]), dtype=tensor.dtype, device=home)
            parts = torch.split(output, list(rows))
            own = parts[group.rank]
            own.copy_(tensor.detach().reshape(own.shape))
            pieces += [part.reshape(-1).view(torch.uint8) for part in parts]
            request.outputs.append((output, rows))
    yield from backend.gather(pieces, list(range(group.size)) * (len(pieces) // group.size))


def gathered_bytes(agreed: Agreed) -> int:
    request, response = agreed
    nbytes = 0
    for tensor, rows in zip(request.tensors, zip(*response.extra, strict=True), strict=True):
        nbytes += sum(rows) * math.prod(tensor.shape[1:]) * tensor.element_size()
    return nbytes


def run_allreduce(site: ExecutionSite, batch: Sequence[Agreed], backend: Backend) -> Coroutine[None]:
    """Reduce; all requests of the batch have the same op and factors."""
    spec = batch[0][0].spec
    op = ReduceOp(spec.op)
    operands = []
    home = home_of(backend)
    for request, response in batch:
        for tensor, strides, alike in zip(request.tensors, request.spec.strides, response.extra, strict=True):
            operands.append(Operand(tensor, strides if alike else None, working_dtype(tensor.dtype, op), home))

    def reduce(dtype: torch.dtype, flats: list[torch.Tensor]) -> Coroutine[None]:
        size = site.group.size
        if op is ReduceOp.ADASUM:
            whole = Adasum(site.group.rank, size, spec.prescale, spec.postscale)
            return in_host_memory(backend, flats, whole.allreduce)
        arithmetic = arithmetic_of(dtype, op, size, spec.prescale, spec.postscale)
        return site.packer.allreduce(backend, flats, arithmetic)

    yield from reduce_operands(operands, reduce)


def run_alltoall(site: ExecutionSite, batch: Sequence[Agreed], backend: Backend) -> Coroutine[None]:
    """Exchange rows, and first how many go to each rank: the coordinator would send size * size to everybody."""
    home = home_of(backend)
    for request, _ in batch:
        tensor, sent = request.tensors
        splits, rows = yield from beside(backend, partial(_exchange_counts, sent))
        output = torch.empty((sum(rows), *tensor.shape[1:]), dtype=tensor.dtype, device=home or "cpu")
        source = Operand(tensor, None, home=home).flat.view(tensor.shape)[: sum(splits)]
        yield from backend.alltoall(_parts(source, splits), _parts(output, rows))
        request.outputs += [output, tuple(rows)]


def _exchange_counts(sent: torch.Tensor, host: Backend) -> Coroutine[tuple[list[int], list[int]]]:
    received = torch.zeros_like(sent)
    yield from host.alltoall(_each(sent), _each(received))
    return sent.tolist(), received.tolist()


def _each(counts: torch.Tensor) -> list[torch.Tensor]:
    return [count.view(1).view(torch.uint8) for count in counts.unbind()]


def _parts(rows: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
    return [part.reshape(-1).view(torch.uint8) for part in torch.split(rows, list(lengths))]


def run_broadcast(site: ExecutionSite, batch: Sequence[Agreed], backend: Backend) -> Coroutine[None]:
    """Write the tensors of the roots, which may differ, to all members."""
    operands = []
    owners = []
    home = home_of(backend)
    for request, response in batch:
        owner = site.group.ranks.index(request.spec.root)
        for tensor, strides, alike in zip(request.tensors, request.spec.strides, response.extra, strict=True):
            operands.append(Operand(tensor, strides if alike else None, home=home))
            owners.append(owner)
    yield from backend.gather([operand.flat.view(torch.uint8) for operand in operands], owners)
    for operand in operands:
        operand.write_back()


def run_plan(site: ExecutionSite, batch: Sequence[Agreed], backend: Backend) -> Coroutine[None]:
    """Take or open a queue; a job like any other, so that queues are opened in the same order everywhere."""
    request, response = batch[0]
    queue = yield from site.queues.take(response.extra.spare_queue)
    runtime = runtime_of(response.extra.device)
    if runtime is not None and queue.device is None:
        try:
            queue.device = yield from site.devices.open(queue.backend, runtime, request.home)
        except LaunchError as error:
            # Of every rank alike: the first queue, where this runs, is as good as before.
            request.finish = partial(refuse, error)
    request.outputs += [queue, response.extra]


def refuse(error: LaunchError, request: Request) -> None:
    raise error


def run_reducescatter(site: ExecutionSite, batch: Sequence[Agreed], backend: Backend) -> Coroutine[None]:
    """Reduce; all requests of the batch have the same op and factors. The inputs are only read."""
    spec = batch[0][0].spec
    op = ReduceOp(spec.op)
    size, rank = site.group.size, site.group.rank
    parts: dict[torch.dtype, list[torch.Tensor]] = {}
    results = []
    home = home_of(backend)
    for request, _ in batch:
        for index, tensor in enumerate(request.tensors):
            rows = request.spec.detail[index] if request.spec.detail else even_rows(len(tensor), size)
            whole = Operand(tensor, None, working_dtype(tensor.dtype, op), home).flat.view(tensor.shape)
            pieces = list(torch.split(whole, list(rows)))
            pieces[rank] = pieces[rank].clone()
            parts.setdefault(whole.dtype, []).extend(piece.reshape(-1) for piece in pieces)
            results.append((request, tensor.dtype, pieces[rank]))
    for dtype, flats in parts.items():
        arithmetic = arithmetic_of(dtype, op, size, spec.prescale, spec.postscale)
        yield from backend.reduce_scatter(flats, list(range(size)) * (len(flats) // size), arithmetic)
    for request, dtype, mine in results:
        request.outputs.append(mine.to(dtype))


def even_rows(total: int, size: int) -> tuple[int, ...]:
    """The rows of each rank; the first ones get one more where they are uneven. 5 rows, 3 ranks: 2, 2, 1."""
    return tuple(total // size + (rank < total % size) for rank in range(size))
