"""An agreed plan of buckets on its op queue: starts the buckets of a step in the order of the plan.

For tensors on a device also the streams in which gradients are made: a bucket waits for these before it starts.

A step that has run is compiled: what stays the same is decided once, and `CompiledStep.run` is a guard and one prepared
run for each part. The guard is one integer, `PlanEpoch.value`: whatever could change a decision (a timeline, a failed
Join context, a broken queue, a shutdown) advances it. Where it has moved, or a gradient lies otherwise in memory than
agreed, nothing has begun, and the general path runs the step and compiles anew. The two paths of different ranks fit
together: both run the same prepared reductions.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Iterable, Sequence
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
from hvlike.collectives.controller.controller import Controller
from hvlike.collectives.controller.trace import recorded
from hvlike.collectives.persistent.bucket import Bucket, PlannedPart, ReductionSettings
from hvlike.collectives.requests.plan import Proposal, describe_names, make_plan
from hvlike.collectives.requests.reduction import arithmetic_of, row_by_row
from hvlike.collectives.requests.request import CallSite, RequestKey
from hvlike.system.system import system
from hvlike.transport.fabric import PlanEpoch
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
        self._memory = settings.memory
        self._dtypes: list[torch.dtype] = [getattr(torch, name) for name in agreed.dtypes]
        groups: Sequence[Sequence[int]] = agreed.settings[1]
        self.plan = make_plan(agreed, [dtype.itemsize for dtype in self._dtypes], groups)
        self.buckets = [
            Bucket(entries, self.plan.strides, self._dtypes, settings, agreed.names, queue.group.rank)
            for entries in self.plan.buckets
        ]
        self._on_device = {
            number for number, entries in enumerate(self.plan.buckets) if any(agreed.devices[each] for each in entries)
        }
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(agreed.shapes, self._dtypes, strict=True)]
        self._bytes = [sum(sizes[index] for index in bucket) for bucket in self.plan.buckets]
        self.active = 0  # How many ranks took part in the last step with gradients of their own
        self.incomplete = False  # Whether one of them lacked some
        self.absent: frozenset[int] = frozenset()  # Then: the entries that none of them had

    def start(
        self,
        number: int,
        tensors: Sequence[torch.Tensor],
        *,
        active: int,
        wake: bool,
        streams: Iterable[Stream] = (),
        drive: bool = False,
    ) -> Operation | None:
        """Start bucket `number` on these tensors, one for each of its entries.

        streams: of a device, where the tensors are made. drive: the caller is about to wait: see OpQueue.run. Returns
        None where the host has nothing left to do.
        """
        self.queue.counters.ran(PLANNED, len(tensors), self._bytes[number])
        counts = number == len(self.buckets) - 1 and number not in self._on_device
        job = self.buckets[number].job(tensors, active=active if counts else None)
        if number in self._on_device:
            rest = self._launch(number, job, streams)
            if rest is None and number < len(self.buckets) - 1:
                return None
            job = rest or _nothing
        if number == len(self.buckets) - 1:
            job = self._counting(job, tensors, active)
        if self.queue.recorder.on:
            job = recorded(self.queue.recorder, self.queue, f"BUCKET {number}", {"plan": self.serial}, tensors, job)
        # A device, and a compressor, may call for the loop.
        drive = drive and number not in self._on_device and self.buckets[number].is_plain
        return self.queue.run(job, drive=drive, wake=wake)

    def sizes(self) -> list[tuple[int, int]]:
        return [(len(bucket.entries), nbytes) for bucket, nbytes in zip(self.buckets, self._bytes, strict=True)]

    def parts(self) -> tuple[list[PlannedPart], int] | None:
        """What reduces the buckets, in their order, and which of them counts."""
        if self._on_device:
            return None
        found: list[PlannedPart] = []
        counting = 0
        for bucket in self.buckets:
            parts = bucket.prepared()
            if parts is None:
                return None
            counting = len(found)
            found.extend(parts)
        return (found, counting) if found else None

    @property
    def device(self) -> DeviceBackend | None:
        return self.queue.device if self._on_device else None

    def in_stream(self) -> AbstractContextManager[Any]:
        """What this thread does with results on the device meanwhile is done after they are there."""
        device = self.device
        return _NOTHING if device is None else device.runtime.use(device.stream)

    def commit(self) -> None:
        """All buckets of a step are reduced: a compressor remembers the step. On every rank, or it is agreed anew."""
        if self._memory is not None:
            self._memory.commit()

    def roll_back(self) -> None:
        if self._memory is not None:
            self._memory.roll_back()

    def zeros(self, number: int) -> list[torch.Tensor]:
        tensors = []
        home = self.device.home if self.device is not None and number in self._on_device else None
        device = home or torch.device("cpu")
        for index in self.plan.buckets[number]:
            shape, strides, dtype = self._agreed.shapes[index], self.plan.strides[index], self._dtypes[index]
            order = row_by_row(shape) if strides is None else strides
            tensors.append(torch.empty_strided(shape, order, dtype=dtype, device=device).zero_())
        return tensors

    def _launch(self, number: int, job: Job, streams: Iterable[Stream]) -> Job | None:
        """Put what can be put into the device's stream at once, here and now; the job that is left, None for none."""
        device = self.device
        assert device is not None
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

    def find_absent(self, missing: Collection[int]) -> Job:
        """The job that finds the entries that no active rank has; `missing`: those that this one lacks."""

        def run(backend: Backend) -> Coroutine[None]:
            with torch.inference_mode(False):
                present = torch.ones(self.entries, dtype=torch.int32, device="cpu")
                present[list(missing)] = 0
            largest = arithmetic_of(torch.int32, ReduceOp.MAX, self.queue.group.size, 1.0, 1.0)
            yield from backend.allreduce([present], largest)
            self.absent = frozenset((present == 0).nonzero().view(-1).tolist())

        return run

    def note_count(self, count: int) -> None:
        self.active, self.incomplete = active_ranks(count), count >= INCOMPLETE

    def _counting(self, job: Job, tensors: Sequence[torch.Tensor], active: int) -> Job:
        number = len(self.buckets) - 1
        bucket, on_device = self.buckets[number], number in self._on_device

        def run(backend: Backend) -> Coroutine[None]:
            if not on_device and bucket.counts(backend, tensors):
                yield from job(backend)
                self.note_count(bucket.active)
            else:
                # First, so that a rank that fails in its job has been counted: the others end their step.
                self.note_count((yield from backend.count_active(active)))
                yield from job(backend)

        return run


class CompiledStep:
    def __init__(
        self,
        schedule: Schedule,
        parts: Sequence[PlannedPart],
        counting: int,
        key: RequestKey,
        epoch: PlanEpoch,
        controller: Controller,
    ) -> None:
        self.thread = threading.get_ident()
        self.epoch = epoch.value  # Of the guard, when this was compiled
        self._key = key
        self._schedule = schedule
        self._parts = parts
        self._counting = counting  # The part with which the count travels
        self._queue: OpQueue = schedule.queue
        self._entered = controller.positions.entered
        self._began = 0.0
        self._tensor_queue = controller.tensor_queue
        self._counts = schedule.queue.counters.of_steps(key[1], PLANNED, schedule.sizes())

    def run(
        self, tensors: Sequence[torch.Tensor], missing: Collection[int], step: int, site: CallSite
    ) -> Operation | None:
        """Reduce the tensors in place, one for each entry of the plan. Collective; does not sleep.

        missing: the entries that this rank lacks, for which it has zeros.
        Returns None when nothing has begun because a tensor does not lie in memory as agreed.
        """
        began = self._began = system.monotonic()
        picked = []
        for part in self._parts:
            mine = part.pick(tensors)
            if not part.fits(mine):
                return None
            addresses = list(map(torch.Tensor.data_ptr, mine))
            if not all(addresses):
                return None
            picked.append((mine, addresses))
        self._entered[self._key[1]] = step
        self._tensor_queue.last = (self._key, site, began)
        return self._queue.run(partial(self._reduce, picked, missing), drive=True)

    @property
    def slow_network(self) -> bool:
        """Whether the network between the nodes was slow in the last step."""
        backend = self._queue.backend
        return isinstance(backend, HierarchicalBackend) and backend.slow

    def count(self) -> None:
        counts, seconds = self._counts, system.monotonic() - self._began
        counts.steps += 1
        counts.seconds += seconds
        counts.last_seconds = seconds
        if seconds > counts.longest_seconds:
            counts.longest_seconds = seconds

    def _reduce(
        self,
        picked: Sequence[tuple[Sequence[torch.Tensor], list[int]]],
        missing: Collection[int],
        backend: Backend,
    ) -> Coroutine[None]:
        """The prepared reductions in the order of the plan, and what is left to find out if a rank lacks some."""
        schedule, active = self._schedule, 1 + INCOMPLETE * bool(missing)
        for number, (part, (tensors, addresses)) in enumerate(zip(self._parts, picked, strict=True)):
            said = active if number == self._counting else None
            count = yield from part.reduction.run(addresses, said, tensors)
            if number == self._counting:
                # As note_count does: where the caches are cold, a call costs more than most statements.
                schedule.active, schedule.incomplete = count % INCOMPLETE, count >= INCOMPLETE
        if schedule.incomplete:
            yield from schedule.find_absent(missing)(backend)


def compile_step(schedule: Schedule, key: RequestKey, epoch: PlanEpoch, controller: Controller) -> CompiledStep | None:
    """Compile the step of a plan that has just run; None where it has to stay with the general path.

    That is for tensors on a device, sparse or empty tensors, compressors with a memory, Adasum, a timeline that
    records, and a queue that is broken.
    """
    queue = schedule.queue
    if not queue.drives or queue.recorder.on or queue.broken is not None or schedule.plan.sparse:
        return None
    parts = schedule.parts()
    return None if parts is None else CompiledStep(schedule, *parts, key, epoch, controller)


def _nothing(backend: Backend) -> Coroutine[None]:
    yield from ()


def _fail(error: Exception, backend: Backend) -> Coroutine[None]:
    yield from ()
    raise error
