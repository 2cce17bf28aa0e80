"""Running what was agreed: responses become jobs on an op queue, and small operations of one kind are fused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from hvlike.backends.base import Backend
from hvlike.backends.cuda.device_backend import DeviceBackend, home_of, on_device
from hvlike.backends.cuda.runtime import KINDS, DeviceRuntime, runtime_of
from hvlike.backends.op_queue import Job, OpQueue, OpQueues
from hvlike.backends.operation import Operation
from hvlike.collectives.controller.operations import (
    Agreed,
    ExecutionSite,
    gathered_bytes,
    reduction_of_spec,
    refuse,
    run_allgather,
    run_allreduce,
    run_alltoall,
    run_broadcast,
    run_plan,
    run_reducescatter,
)
from hvlike.collectives.controller.trace import Trace
from hvlike.collectives.requests.collective_jobs import PlainAllreduces
from hvlike.collectives.requests.request import RequestSpec
from hvlike.config import Config
from hvlike.errors import LaunchError
from hvlike.transport.loop.coroutine import Coroutine

JOBS: dict[str, Callable[[ExecutionSite, Sequence[Agreed], Backend], Coroutine[None]]] = {
    "allgather": run_allgather,
    "allreduce": run_allreduce,
    "alltoall": run_alltoall,
    "broadcast": run_broadcast,
    "queue": run_plan,
    "plan": run_plan,
    "reducescatter": run_reducescatter,
}
"""What each kind does on a queue; a barrier is over once it is agreed."""

AGREEMENTS = ("queue", "plan")  # Kinds that move nothing of the user's
OPEN_AFTER = 3  # Reductions of single tensors before inline allreduce is set up, which takes memory


class Executor:
    def __init__(
        self, queues: OpQueues, trace: Trace, knobs: Config, opening: Callable[[], Coroutine[None]] | None = None
    ) -> None:
        """opening: what to do on the queue, once, after the first few reductions of single tensors."""
        self.site = ExecutionSite(queues, knobs)
        self._trace = trace
        self._limit = knobs.fusion_threshold
        self._opening = opening
        self._single = 0
        self._plain = PlainAllreduces(queues.first)

    def run(self, agreed: list[Agreed]) -> None:
        """Run what was agreed, each batch as one job on the first queue."""
        queue = self.site.queues.first
        batches = [agreed] if len(agreed) == 1 else fuse(agreed, self._limit)
        for batch in batches:
            if batch[0][0].spec.kind == "barrier":
                self._end_barriers(batch)
                continue
            job, in_stream = self._job_of(batch)
            for request, _ in batch:
                request.operation.begin()
            queue.run(job).then(partial(complete, batch, queue if in_stream else None))

    def _end_barriers(self, batch: list[Agreed]) -> None:
        complete(batch, None)
        if self._trace.recorder.on:
            self._trace.began(batch)
            self._trace.ended(batch)

    def _job_of(self, batch: list[Agreed]) -> tuple[Job, bool]:
        """The job of a batch, and whether that is in the stream of a device."""
        request, response = batch[0]
        queue, recording = self.site.queues.first, self._trace.recorder.on
        spec, kind = request.spec, request.spec.kind
        if kind not in AGREEMENTS:
            queue.counters.ran(kind, len(batch), sum(map(size_of, batch)))
        is_single = kind == "allreduce" and len(batch) == len(request.tensors) == 1
        job: Job | None = None
        if request.job is not None:
            request.outputs.append(response.extra)
            job = request.job(response.extra)
        elif is_single and not recording and spec.device not in KINDS:
            job = self._plain.job(request.tensors[0], reduction_of_spec(spec))
        if job is None:
            job = partial(JOBS[kind], self.site, batch)
        runtime = runtime_of(spec.device) if spec.device in KINDS and request.tensors else None
        if runtime is not None:
            job = self._on_device(runtime, job, batch)
        if self._opening is not None and kind == "allreduce":
            job = self._opening_after(job, batch)
        if recording:
            job = self._trace.observe(queue, batch, job)
        return job, runtime is not None

    def _on_device(self, runtime: DeviceRuntime, job: Job, batch: Sequence[Agreed]) -> Job:
        site, queue = self.site, self.site.queues.first
        device = next(
            (each.device for request, _ in batch for each in request.tensors if each.device.type == runtime.kind), None
        )
        ready = [event for request, _ in batch for event in request.ready]

        def run(backend: Backend) -> Coroutine[None]:
            home = home_of(backend)
            for request, _ in batch:
                if request.spec.kind == "allreduce":
                    # Those of a rank that has joined were made in host memory.
                    request.tensors = [
                        each if each.device.type == runtime.kind else each.to(home) for each in request.tensors
                    ]
            yield from job(backend)

        def opening(host: Backend) -> Coroutine[DeviceBackend | None]:
            try:
                return (yield from site.devices.open(host, runtime, device))
            except LaunchError as error:
                # Of every rank alike: the queue is as good as before.
                for request, _ in batch:
                    request.finish = partial(refuse, error)
                return None

        return on_device(queue, opening, run, ready)

    def _opening_after(self, job: Job, batch: Sequence[Agreed]) -> Job:
        """The job, and after it the opening if it is time; decided by what was agreed, so alike on every rank."""
        self._single += sum(response.uniform and len(response.spec.shapes) == 1 for _, response in batch)
        opening = self._opening
        if opening is None or self._single < OPEN_AFTER:
            return job
        self._opening = None

        def run(backend: Backend) -> Coroutine[None]:
            yield from job(backend)
            yield from opening()

        return run


def fuse(agreed: Sequence[Agreed], limit: int) -> list[list[Agreed]]:
    """Join neighbours that one job can do, up to `limit` bytes; it depends on the announcement alone."""
    batches: list[list[Agreed]] = []
    filled = 0
    for each in agreed:
        size = size_of(each)
        kind = fusion_kind(each[0].spec)
        if batches and kind is not None and kind == fusion_kind(batches[-1][-1][0].spec) and filled + size <= limit:
            batches[-1].append(each)
            filled += size
        else:
            batches.append([each])
            filled = size
    return batches


def fusion_kind(spec: RequestSpec) -> Any:
    if spec.kind in ("allreduce", "reducescatter"):
        return (spec.kind, spec.device, spec.op, spec.prescale, spec.postscale)
    return (spec.kind, spec.device) if spec.kind in ("allgather", "broadcast", "barrier") else None


def size_of(agreed: Agreed) -> int:
    """How many bytes an operation moves; the same number on every rank."""
    request = agreed[0]
    if request.spec.kind == "allgather":
        return gathered_bytes(agreed)
    nbytes = 0
    for tensor in request.tensors:
        nbytes += tensor.nbytes
    return nbytes


def complete(batch: Sequence[Agreed], queue: OpQueue | None, whole: Operation | None = None) -> None:
    """Tell the callers how `whole`, the batch on its queue, has ended; None: there was nothing to do.

    queue: of a device, if the batch is in its stream: that may not have come so far, and a waiting stream waits for it.
    """
    error = None if whole is None else whole.error
    device = None if queue is None else queue.device
    with nullcontext() if device is None or error is not None else device.runtime.use(device.stream):
        for request, _ in batch:
            operation, failure = request.operation, error
            if failure is None:
                try:
                    if device is not None:
                        device.keep(request.tensors)
                    operation.value = request.finish(request)
                    operation.fence = None if device is None else device.fence(operation.value)
                except Exception as error_of_one:
                    failure = error_of_one
            operation.end(failure)
