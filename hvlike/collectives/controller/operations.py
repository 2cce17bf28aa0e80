"""The work of each negotiated operation, which an op queue runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.backends.base import Backend
from hvlike.backends.cuda.device_backend import beside, home_of
from hvlike.backends.cuda.runtime import runtime_of
from hvlike.backends.fusion_buffer import FusionBuffer
from hvlike.backends.op_queue import OpQueues
from hvlike.collectives.requests import collective_jobs
from hvlike.collectives.requests.collective_jobs import Strides
from hvlike.collectives.requests.message_table import Response
from hvlike.collectives.requests.reduction import ScaledOp
from hvlike.collectives.requests.request import Request, RequestSpec
from hvlike.config import Config
from hvlike.errors import LaunchError
from hvlike.transport.loop.coroutine import Coroutine
from hvlike.transport.world import Group

if TYPE_CHECKING:
    from hvlike.backends.cuda.opening import BackendChoice, DeviceBackends


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
    def device_choice(self) -> BackendChoice | None:
        """The backend that was chosen for them, and why; None before the first one."""
        return None if self._devices is None else self._devices.choice

    def close(self) -> None:
        if self._devices is not None:
            self._devices.close()


def run_allgather(site: ExecutionSite, batch: Sequence[Agreed], backend: Backend) -> Coroutine[None]:
    """Gather; the outputs of a request are pairs of a tensor and the rows that each rank has in it."""
    inputs, outputs = [], []
    for request, response in batch:
        for tensor, rows in zip(request.tensors, zip(*response.extra, strict=True), strict=True):
            output = _empty(backend, rows, tensor)
            request.outputs.append((output, rows))
            inputs.append(tensor)
            outputs.append(torch.split(output, list(rows)))
    yield from collective_jobs.allgather(site.group, outputs, inputs, backend)


def _empty(backend: Backend, rows: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Rows like those of a tensor, for so many of each rank, where the backend has its tensors."""
    return torch.empty((sum(rows), *like.shape[1:]), dtype=like.dtype, device=home_of(backend) or "cpu")


def gathered_bytes(agreed: Agreed) -> int:
    request, response = agreed
    nbytes = 0
    for tensor, rows in zip(request.tensors, zip(*response.extra, strict=True), strict=True):
        nbytes += sum(rows) * math.prod(tensor.shape[1:]) * tensor.element_size()
    return nbytes


def reduction_of_spec(spec: RequestSpec) -> ScaledOp:
    return ScaledOp(ReduceOp(spec.op), spec.prescale, spec.postscale)


def run_allreduce(site: ExecutionSite, batch: Sequence[Agreed], backend: Backend) -> Coroutine[None]:
    """Reduce; all requests of the batch have the same op and factors."""
    reduction = reduction_of_spec(batch[0][0].spec)
    tensors, strides = _with_strides(batch)
    return collective_jobs.allreduce(site.group, tensors, strides, reduction, site.packer, backend)


def _with_strides(batch: Sequence[Agreed]) -> tuple[list[torch.Tensor], list[Strides]]:
    tensors: list[torch.Tensor] = []
    strides: list[Strides] = []
    for request, response in batch:
        tensors += request.tensors
        strides += [order if alike else None for order, alike in zip(request.spec.strides, response.extra, strict=True)]
    return tensors, strides


def run_alltoall(site: ExecutionSite, batch: Sequence[Agreed], backend: Backend) -> Coroutine[None]:
    """Exchange rows, and first how many go to each rank: the coordinator would send size * size to everybody."""
    for request, _ in batch:
        tensor, sent = request.tensors
        splits, rows = yield from beside(backend, partial(_exchange_counts, sent))
        output = _empty(backend, rows, tensor)
        sends = torch.split(tensor[: sum(splits)], splits)
        yield from collective_jobs.alltoall(torch.split(output, rows), sends, backend)
        request.outputs += [output, tuple(rows)]


def _exchange_counts(sent: torch.Tensor, host: Backend) -> Coroutine[tuple[list[int], list[int]]]:
    received = torch.zeros_like(sent)
    yield from collective_jobs.alltoall(torch.split(received, 1), torch.split(sent, 1), host)
    return sent.tolist(), received.tolist()


def run_broadcast(site: ExecutionSite, batch: Sequence[Agreed], backend: Backend) -> Coroutine[None]:
    """Write the tensors of the roots, which may differ, to all members."""
    tensors, strides = _with_strides(batch)
    owners = [site.group.ranks.index(request.spec.root) for request, _ in batch for _ in request.tensors]
    return collective_jobs.broadcast(tensors, strides, owners, backend)


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
    inputs, outputs = [], []
    size, rank = site.group.size, site.group.rank
    for request, _ in batch:
        for index, tensor in enumerate(request.tensors):
            rows = request.spec.detail[index] if request.spec.detail else even_rows(len(tensor), size)
            output = _empty(backend, rows[rank : rank + 1], tensor)
            request.outputs.append(output)
            outputs.append(output)
            inputs.append(torch.split(tensor.detach(), list(rows)))
    yield from collective_jobs.reduce_scatter(site.group, outputs, inputs, reduction_of_spec(batch[0][0].spec), backend)


def even_rows(total: int, size: int) -> tuple[int, ...]:
    """The rows of each rank; the first ones get one more where they are uneven. 5 rows, 3 ranks: 2, 2, 1."""
    return tuple(total // size + (rank < total % size) for rank in range(size))
