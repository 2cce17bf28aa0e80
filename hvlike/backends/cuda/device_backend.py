r"""Backends for tensors of a GPU: jobs run on a stream, callers wait there, and the tensors travel through host memory.

    the caller's stream    ... gradient | event                         wait | uses the result
                                          \                             /
    the backend's stream                      wait | pack | reduce | unpack | event

Whoever begins a call only puts the first copies into a stream; all else is done in the loop, which waits for nothing
but what the host has to read. A job is a coroutine like any other; each of its steps is taken with the backend's stream
as the current one, so that whatever torch does there, copies, casts, memory, belongs to that stream.

    stream of the backend   pack |                                     | unpack
    stream down                | piece 0 | piece 1 | piece 2 |       |
    host                                 | reduce 0 | reduce 1 | reduce 2
    stream up                                       | piece 0 | piece 1 | piece 2

For ranks that share a GPU, and where there is no NCCL. The pieces of one call overlap each other, and those of a bucket
of gradients the rest of the backward pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any, TypeVar

import torch

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.base import Backend, PreparedReduction, TracedBackend
from hvlike.backends.cuda.runtime import DeviceRuntime, Event, Stream
from hvlike.backends.fusion_buffer import SMALL_ON_DEVICE, PackedReduction
from hvlike.backends.network.partition import Message, Run, message_length, messages
from hvlike.backends.op_queue import Job, OpQueue
from hvlike.errors import HorovodInternalError
from hvlike.transport.loop.coroutine import Coroutine, Wait

T = TypeVar("T")

PIECE_BYTES = 4 << 20  # What is copied at once: at 20 GB/s it takes 0.2 ms, many times what it costs to begin a copy
AHEAD = 8

Work = Callable[[Message, list[torch.Tensor]], Coroutine[None]]  # Done with the copies of some runs, in host memory


def _where_they_are(method: str) -> Callable[..., Coroutine[None]]:
    """A method of DeviceBackend: the host's for tensors that are not on the device, else the one with an underscore."""

    def call(self: DeviceBackend, tensors: Sequence[torch.Tensor], *others: Any) -> Coroutine[None]:
        if tensors and tensors[0].device != self.home:
            yield from self.beside(getattr(self.host, method)(tensors, *others))
        else:
            yield from getattr(self, f"_{method}")(tensors, *others)

    return call


class DeviceBackend:
    """Stages tensors of a device in pinned host memory. Tensors in host memory (flags, counts) go the host's way."""

    name = "STAGED"
    launches = False  # The first step of a job begins all of it: nothing is left for the loop to do

    def __init__(self, host: Backend, runtime: DeviceRuntime, device: torch.device, rank: int) -> None:
        """host: the backend of the same op queue for host memory; rank: of this process in the group."""
        self.host = host
        self.runtime = runtime
        self.home = device  # Where the tensors have to be
        self.stream: Stream = runtime.new_stream(device)
        self.broken: BaseException | None = None
        self._rank = rank
        self._down = runtime.common_stream(device, "down")
        self._up = runtime.common_stream(device, "up")

    def prepare(self, lengths: Sequence[int], arithmetic: Arithmetic) -> PreparedReduction:
        return PackedReduction(self, self.allreduce, arithmetic, SMALL_ON_DEVICE)

    # -- the way in and out ---------------------------------------------------------------------

    def run(self, coroutine: Coroutine[T], ready: Iterable[Event] = ()) -> Coroutine[T]:
        """Take the steps of a job on the stream, after the events from which on its tensors hold their values."""
        for event in ready:
            self.runtime.wait(self.stream, event)
        return (yield from self._stepping(coroutine, self._on_stream))

    def beside(self, coroutine: Coroutine[T]) -> Coroutine[T]:
        """What the host does itself in the middle of a job, in the loop; whatever stream is in use."""
        # The thread that begins a job may be one that the host's backend does not know.
        yield Wait.AGAIN
        return (yield from self._stepping(coroutine, self.runtime.aside))

    def _on_stream(self) -> AbstractContextManager[Any]:
        self.check()
        return self.runtime.use(self.stream)

    def _stepping(self, coroutine: Coroutine[T], inside: Callable[[], AbstractContextManager[Any]]) -> Coroutine[T]:
        """Take each step of a coroutine in a context of its own, and none while it waits."""
        try:
            while True:
                with self.runtime.beside_captures(), inside():
                    try:
                        wait = coroutine.send(None)
                    except StopIteration as stop:
                        result: T = stop.value
                        return result
                yield wait
        finally:
            coroutine.close()

    def keep(self, tensors: Any) -> None:
        """The stream uses these tensors, perhaps in lists: what is asked of it now may be done after they are gone."""
        for tensor in tensors_in(tensors):
            if tensor.device.type == self.runtime.kind:
                self.runtime.keep(tensor, self.stream)

    def fence(self, result: Any = None) -> Callable[[], None]:
        """What a caller calls before it uses the result, tensors, perhaps in lists: its stream waits for this one.
        Raises what has gone wrong on the device meanwhile.
        """
        event, tensors, runtime = self.runtime.record(self.stream), list(tensors_in(result)), self.runtime

        def wait() -> None:
            self.check()
            stream = runtime.current_stream(self.home)
            runtime.wait(stream, event)
            for tensor in tensors:
                runtime.keep(tensor, stream)

        return wait

    def check(self) -> None:
        if self.broken is not None:
            raise self.broken

    def watch(self, now: float) -> HorovodInternalError | None:
        """What has gone wrong since, a few times a second; now: of time.monotonic(). In the loop."""
        return None

    def abort(self, error: BaseException) -> None:
        """Do nothing more; who waits, and who asks later, gets `error`. Does not block."""
        self.broken = self.broken or error

    # -- what a backend does ----------------------------------------------------------------------

    allreduce = _where_they_are("allreduce")
    reduce_scatter = _where_they_are("reduce_scatter")
    gather = _where_they_are("gather")
    alltoall = _where_they_are("alltoall")

    def count_active(self, active: int) -> Coroutine[int]:
        return (yield from self.beside(self.host.count_active(active)))

    def close(self) -> None:
        """Give back what belongs to the device; the host's backend has its own end."""
        self.abort(RuntimeError("the backend was closed"))

    def on_host(
        self, tensors: Sequence[torch.Tensor], work: Callable[[Backend, Sequence[torch.Tensor]], Coroutine[None]]
    ) -> Coroutine[None]:
        """Run `work(host backend, copies in host memory)`, then bring the copies back into the tensors."""

        def whole(runs: Message, copies: list[torch.Tensor]) -> Coroutine[None]:
            yield from work(self.host, copies)

        everything = range(len(tensors))
        yield from self._through(tensors, [_whole_runs(tensors)], everything, everything, whole)

    def _allreduce(self, tensors: Sequence[torch.Tensor], arithmetic: Arithmetic) -> Coroutine[None]:
        def reduce(runs: Message, copies: list[torch.Tensor]) -> Coroutine[None]:
            # They lie one after another.
            whole = copies[0].as_strided((sum(map(len, copies)),), (1,))
            yield from self.host.allreduce([whole], arithmetic)

        everything = range(len(tensors))
        yield from self._through(tensors, pieces_of(tensors), everything, everything, reduce)

    def _reduce_scatter(
        self, tensors: Sequence[torch.Tensor], owners: Sequence[int], arithmetic: Arithmetic
    ) -> Coroutine[None]:
        def reduce(runs: Message, copies: list[torch.Tensor]) -> Coroutine[None]:
            yield from self.host.reduce_scatter(copies, [owners[run.piece] for run in runs], arithmetic)

        own = {index for index, owner in enumerate(owners) if owner == self._rank}
        yield from self._through(tensors, pieces_of(tensors), range(len(tensors)), own, reduce)

    def _gather(self, tensors: Sequence[torch.Tensor], owners: Sequence[int]) -> Coroutine[None]:
        def write(runs: Message, copies: list[torch.Tensor]) -> Coroutine[None]:
            yield from self.host.gather(copies, [owners[run.piece] for run in runs])

        own = {index for index, owner in enumerate(owners) if owner == self._rank}
        yield from self._through(tensors, pieces_of(tensors), own, set(range(len(tensors))) - own, write)

    def _alltoall(self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> Coroutine[None]:
        def exchange(runs: Message, copies: list[torch.Tensor]) -> Coroutine[None]:
            yield from self.host.alltoall(copies[: len(sends)], copies[len(sends) :])

        # What goes to one rank is as long as what comes from another, so it cannot be cut alike everywhere.
        tensors = [*sends, *receives]
        writes = range(len(sends), len(tensors))
        yield from self._through(tensors, [_whole_runs(tensors)], range(len(sends)), writes, exchange)

    # -- down, work, up -------------------------------------------------------------------------

    def _through(
        self,
        tensors: Sequence[torch.Tensor],
        pieces: Sequence[Message],
        reads: Collection[int],
        writes: Collection[int],
        work: Work,
    ) -> Coroutine[None]:
        """Bring the pieces that `reads` needs to the host, have them worked on, and bring back those in `writes`."""
        # Also what is only written here: it may be in use until now. Each piece is waited for before it goes up.
        self.runtime.wait(self._down, self.runtime.record(self.stream))
        waiting = iter(pieces)
        loaded = deque(self._load(tensors, piece, reads) for piece in islice(waiting, AHEAD))
        # What follows is the loop's: the host's backend may only be used there.
        yield Wait.AGAIN
        while loaded:
            piece = loaded.popleft()
            while not self.runtime.has_passed(piece.ready):
                yield Wait.POLL
            yield from self.beside(work(piece.runs, piece.copies))
            with self.runtime.use(self._up):
                for target, copy in piece.places(tensors, writes):
                    self.runtime.copy(target, copy)
            loaded.extend(self._load(tensors, each, reads) for each in islice(waiting, 1))
        self.runtime.wait(self.stream, self.runtime.record(self._up))

    def _load(self, tensors: Sequence[torch.Tensor], runs: Message, reads: Collection[int]) -> _Crossing:
        dtype = tensors[runs[0].piece].dtype if runs else torch.uint8
        piece = _Crossing(runs, self.runtime.pinned(message_length(runs) * dtype.itemsize).view(dtype))
        with self.runtime.use(self._down):
            for source, copy in piece.places(tensors, reads):
                self.runtime.copy(copy, source)
        piece.ready = self.runtime.record(self._down)
        return piece


class _Crossing:
    def __init__(self, runs: Message, buffer: torch.Tensor) -> None:
        """buffer: as long as the runs together."""
        self.runs = runs
        self.copies = list(torch.split(buffer, [run.stop - run.start for run in runs]))
        self.ready: Event = None  # Where the copies hold the values

    def places(
        self, tensors: Sequence[torch.Tensor], chosen: Collection[int]
    ) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """The parts of the chosen tensors that lie in this piece, each with its copy."""
        for (index, start, stop), copy in zip(self.runs, self.copies, strict=True):
            if index in chosen and len(copy):
                yield tensors[index][start:stop], copy


class SoloDeviceBackend(DeviceBackend):
    """Nothing leaves the device, except what has to be computed by the host."""

    name = "SOLODEVICE"
    launches = True

    def _allreduce(self, tensors: Sequence[torch.Tensor], arithmetic: Arithmetic) -> Coroutine[None]:
        factors = arithmetic.factors
        scale_(tensors, factors.prescale)
        scale_(tensors, factors.postscale / factors.divisor)
        yield from ()

    def _reduce_scatter(
        self, tensors: Sequence[torch.Tensor], owners: Sequence[int], arithmetic: Arithmetic
    ) -> Coroutine[None]:
        yield from self._allreduce(tensors, arithmetic)

    def _gather(self, tensors: Sequence[torch.Tensor], owners: Sequence[int]) -> Coroutine[None]:
        yield from ()

    def _alltoall(self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> Coroutine[None]:
        receives[0].copy_(sends[0])
        yield from ()


def scale_(tensors: Sequence[torch.Tensor], factor: float) -> None:
    """Multiply flat tensors of one dtype in place; 16-bit floats in float32, integers in double, toward zero."""
    if factor == 1 or not tensors:
        return
    if tensors[0].dtype.is_floating_point or tensors[0].dtype.is_complex:
        torch._foreach_mul_(list(tensors), factor)
        return
    for tensor in tensors:
        tensor.copy_(tensor.double().mul_(factor).trunc_())


def pieces_of(tensors: Sequence[torch.Tensor]) -> list[Message]:
    """Cut tensors of one dtype into pieces, the same on all ranks."""
    return messages(_whole_runs(tensors), PIECE_BYTES // tensors[0].element_size()) if tensors else []


def _whole_runs(tensors: Sequence[torch.Tensor]) -> Message:
    return [Run(index, 0, len(tensor)) for index, tensor in enumerate(tensors)]


def tensors_in(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each)


def device_of(backend: Backend) -> DeviceBackend | None:
    """The backend of a device that a job was given; None where it works on host memory."""
    inner = backend.backend if isinstance(backend, TracedBackend) else backend
    return inner if isinstance(inner, DeviceBackend) else None


def home_of(backend: Backend) -> torch.device | None:
    device = device_of(backend)
    return None if device is None else device.home


def on_device(
    queue: OpQueue,
    opening: Callable[[Backend], Coroutine[DeviceBackend | None]] | None,
    job: Job,
    ready: Iterable[Event] = (),
) -> Job:
    """The same job for the device backend of the op queue.

    opening: opens it if this is the first job, or returns None, and the job is not run; None where it was opened with
    the queue. ready: when the tensors of the job hold their values.
    """

    def run(host: Backend) -> Coroutine[Any]:
        if queue.device is None and opening is not None:
            queue.device = yield from opening(queue.backend)
        device = queue.device
        if device is None:
            return None
        backend: Backend = host.over(device) if isinstance(host, TracedBackend) else device
        return (yield from device.run(job(backend), ready))

    return run


def beside(backend: Backend, work: Callable[[Backend], Coroutine[T]]) -> Coroutine[T]:
    """Have the ranks' hosts do something among themselves in the middle of a job; its result."""
    device = device_of(backend)
    if device is None:
        return (yield from work(backend))
    return (yield from device.beside(work(device.host)))


def in_host_memory(
    backend: Backend,
    tensors: Sequence[torch.Tensor],
    work: Callable[[Backend, Sequence[torch.Tensor]], Coroutine[None]],
) -> Coroutine[None]:
    """Do `work(backend, tensors)`, which takes host memory only: with copies, where the tensors are on a device."""
    device = device_of(backend)
    yield from work(backend, tensors) if device is None else device.on_host(tensors, work)
