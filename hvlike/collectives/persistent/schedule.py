"""An agreed plan of buckets on its op queue: starts the buckets of a step in the order of the plan.

For tensors on a device also the streams in which gradients are made: a bucket waits for these before it starts.

A step is one job for each bucket that starts early, and one for the rest. Where all tensors lie in memory as agreed
(`in_memory`), nothing is left to decide; else each part looks at its tensors first. All ranks run the same reductions
in the same order, whichever of this is so on each of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.backends.base import INCOMPLETE, Backend, active_ranks
from hvlike.backends.cuda.device_backend import DeviceBackend, on_device
from hvlike.backends.cuda.runtime import DeviceRuntime, Stream, runtime_of
from hvlike.backends.hierarchical import HierarchicalBackend
from hvlike.backends.op_queue import Job, OpQueue
from hvlike.backends.operation import Operation
from hvlike.collectives.controller.trace import recorded
from hvlike.collectives.persistent.bucket import ActiveJob, Bucket, ReductionSettings
from hvlike.collectives.requests.plan import Proposal, describe_names, make_plan
from hvlike.collectives.requests.reduction import arithmetic_of, row_by_row
from hvlike.transport.loop.coroutine import Coroutine


class GradientStreams:
    """The streams of one step, by bucket; used with the lock of the reducer held."""

    def __init__(self, runtime: DeviceRuntime, devices: Sequence[torch.device]) -> None:
        """devices: all that have gradients; the first is where they are reduced."""
        self.home = devices[0]
        self._runtime = runtime
        self._devices = devices
        self._streams: dict[int, dict[Stream, None]] = {}

    def note(self, bucket: int, tensor: torch.Tensor) -> None:
        self._streams.setdefault(bucket, {})[self._runtime.current_stream(tensor.device)] = None

    def streams(self, bucket: int) -> Collection[Stream]:
        """What a bucket that is started now has to wait for."""
        return {**self._streams.get(bucket, {}), **self._current()}

    def leave(self, backend: DeviceBackend | None) -> BaseException | None:
        """Make this thread's streams, and those that were noted, wait for the results; what has gone wrong, if any."""
        if backend is None:
            return None
        if backend.broken is None:
            event = self._runtime.record(backend.stream)
            noted = {stream: None for streams in self._streams.values() for stream in streams}
            for stream in {**noted, **self._current()}:
                self._runtime.wait(stream, event)
        return backend.broken

    def clear(self) -> None:
        self._streams.clear()

    def _current(self) -> dict[Stream, None]:
        return {self._runtime.current_stream(device): None for device in self._devices}


def gradient_streams_of(devices: Iterable[torch.device]) -> GradientStreams | None:
    """For tensors of these devices; None where all are reduced in host memory."""
    found = [(runtime, device) for device in dict.fromkeys(devices) if (runtime := runtime_of(device.type)) is not None]
    return GradientStreams(found[0][0], [device for _, device in found]) if found else None


def no_streams(bucket: int) -> Collection[Stream]:
    return ()


_NOTHING: AbstractContextManager[Any] = nullcontext()

PLANNED = "gradients"


class Schedule:
    """Starts the buckets of a plan, in its order, step after step.

    With the last bucket travels the count of active ranks, so that every rank knows when all have joined, and whether
    one lacks some tensors. Then follows which ones nobody has.
    """

    def __init__(self, agreed: Proposal, queue: OpQueue, settings: ReductionSettings) -> None:
        self.serial = agreed.serial
        self.queue = queue
        self.described = describe_names(agreed.names)
        self.entries = len(agreed.names)
        self._agreed = agreed
        self._dtypes: list[torch.dtype] = [getattr(torch, name) for name in agreed.dtypes]
        groups: Sequence[Sequence[int]] = agreed.settings[1]
        self.plan = make_plan(agreed, [dtype.itemsize for dtype in self._dtypes], groups)
        self.buckets = [
            Bucket(entries, self.plan.strides, self._dtypes, settings, queue.group.rank)
            for entries in self.plan.buckets
        ]
        self._on_device = {
            number for number, entries in enumerate(self.plan.buckets) if any(agreed.devices[each] for each in entries)
        }
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(agreed.shapes, self._dtypes, strict=True)]
        self._sizes = [(len(bucket), sum(sizes[index] for index in bucket)) for bucket in self.plan.buckets]
        self._drives = [each.is_plain and number not in self._on_device for number, each in enumerate(self.buckets)]
        self.active = 0  # How many ranks took part in the last step with gradients of their own
        self.incomplete = False  # Whether one of them lacked some
        self.absent: frozenset[int] = frozenset()  # Then: the entries that none of them had

    def in_memory(self, tensors: Sequence[torch.Tensor]) -> list[list[ActiveJob]] | None:
        """The jobs of each bucket where all tensors are reduced as they are; None where one has to be looked at."""
        found: list[list[ActiveJob]] = []
        for bucket in self.buckets:
            if bucket.parts is None:
                return None
            found.append(jobs := [])
            for pick, packer in bucket.parts:
                job = packer.in_memory(pick(tensors))
                if job is None:
                    return None
                jobs.append(job)
        return found

    def start(
        self,
        numbers: range,
        tensors: Any,
        active: int = 1,
        missing: Collection[int] = (),
        in_memory: Sequence[list[ActiveJob]] | None = None,
        streams: Callable[[int], Collection[Stream]] = no_streams,
        *,
        drive: bool = False,
        wake: bool = False,
    ) -> Operation | None:
        """Start buckets of a step on these tensors, by entry.

        active, missing: with the last bucket; what a rank says of itself, and which entries it lacks. in_memory: what
        that has found. streams: of a device, where the tensors of a bucket are made. drive: the caller is about to
        wait: see OpQueue.run. Returns None where the host has nothing left to do.
        """
        queue = self.queue
        jobs: list[ActiveJob] = []
        for number in numbers:
            queue.counters.ran(PLANNED, *self._sizes[number])
            # A device, and a compressor, may call for the loop.
            drive = drive and self._drives[number]
            if in_memory is not None and not (queue.recorder.on or number in self._on_device):
                jobs += in_memory[number]
            else:
                jobs += self._looking(number, tensors, streams)
        if not jobs:
            return None
        said = active if numbers.stop == len(self.buckets) else None
        return queue.run(partial(self._run, jobs, said, missing), drive=drive, wake=wake)

    def _looking(self, number: int, tensors: Any, streams: Callable[[int], Collection[Stream]]) -> Iterator[ActiveJob]:
        """The job of a bucket that looks at its tensors; none where a device does all of it."""
        bucket = self.buckets[number]
        job = bucket.job(tensors)
        if number in self._on_device:
            rest = self._launch(number, job, streams(number))
            if rest is None and number < len(self.buckets) - 1:
                return
            job = partial(self._after_the_count, rest)
        yield self._recorded(number, bucket.pick(tensors), job) if self.queue.recorder.on else job

    def _run(
        self, jobs: Sequence[ActiveJob], said: int | None, missing: Collection[int], backend: Backend
    ) -> Coroutine[None]:
        """said: what is counted with the last of the jobs; None: the last bucket of the step is not among them."""
        for job in jobs[:-1]:
            yield from job(backend, None)
        count = yield from jobs[-1](backend, said)
        if said is not None:
            self.active, self.incomplete = active_ranks(count), count >= INCOMPLETE
            if self.incomplete:
                yield from self._find_absent(missing, backend)

    def is_on_device(self, index: int) -> bool:
        """Whether an entry is reduced on a device."""
        return bool(self._agreed.devices[index])

    @property
    def slow_network(self) -> bool:
        """Whether the network between the nodes was slow in the last step."""
        backend = self.queue.backend
        return isinstance(backend, HierarchicalBackend) and backend.slow

    @property
    def device(self) -> DeviceBackend | None:
        return self.queue.device if self._on_device else None

    def in_stream(self) -> AbstractContextManager[Any]:
        """What this thread does with results on the device meanwhile is done after they are there."""
        device = self.device
        return _NOTHING if device is None else device.runtime.use(device.stream)

    def zeros(self) -> dict[int, torch.Tensor]:
        """Tensors for all buckets, by entry."""
        tensors = {}
        for number, entries in enumerate(self.plan.buckets):
            home = self.device.home if self.device is not None and number in self._on_device else "cpu"
            for index in entries:
                shape, strides, dtype = self._agreed.shapes[index], self.plan.strides[index], self._dtypes[index]
                order = row_by_row(shape) if strides is None else strides
                tensors[index] = torch.empty_strided(shape, order, dtype=dtype, device=home).zero_()
        return tensors

    def _launch(self, number: int, bucket_job: ActiveJob, streams: Iterable[Stream]) -> Job | None:
        """Put what can be put into the device's stream at once, here and now; the job that is left, None for none."""
        device = self.device
        assert device is not None

        def job(backend: Backend) -> Coroutine[int]:
            return bucket_job(backend, None)

        ready = [device.runtime.record(stream) for stream in dict.fromkeys(streams)]
        if self.queue.recorder.on or not (self.buckets[number].is_plain or device.launches):
            return on_device(self.queue, None, job, ready)
        coroutine = device.run(job(device), ready)
        try:
            next(coroutine)
        except StopIteration:
            return None
        except Exception as error:
            # It shall end the queue like an error that comes later.
            return partial(_fail, error)
        return lambda backend: coroutine

    def _after_the_count(self, rest: Job | None, backend: Backend, active: int | None) -> Coroutine[int]:
        # First, so that a rank that fails in its job has been counted: the others end their step.
        count = 0 if active is None else (yield from backend.count_active(active))
        if rest is not None:
            yield from rest(backend)
        return count

    def _recorded(self, number: int, tensors: Sequence[torch.Tensor], job: ActiveJob) -> ActiveJob:
        recorder, arguments = self.queue.recorder, {"plan": self.serial}

        def run(backend: Backend, active: int | None) -> Coroutine[int]:
            def inside(traced: Backend) -> Coroutine[int]:
                return job(traced, active)

            return recorded(recorder, self.queue, f"BUCKET {number}", arguments, tensors, inside)(backend)

        return run

    def _find_absent(self, missing: Collection[int], backend: Backend) -> Coroutine[None]:
        """Find the entries that no active rank has; `missing`: those that this one lacks."""
        with torch.inference_mode(False):
            present = torch.ones(self.entries, dtype=torch.int32, device="cpu")
            present[list(missing)] = 0
        largest = arithmetic_of(torch.int32, ReduceOp.MAX, self.queue.group.size, 1.0, 1.0)
        yield from backend.allreduce([present], largest)
        self.absent = frozenset((present == 0).nonzero().view(-1).tolist())


def _fail(error: Exception, backend: Backend) -> Coroutine[None]:
    yield from ()
    raise error
