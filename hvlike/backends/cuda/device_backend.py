r"""A backend for tensors of a GPU: jobs run on its stream, and callers wait there, not here.

    the caller's stream    ... gradient | event                         wait | uses the result
                                          \                             /
    the backend's stream                      wait | pack | reduce | unpack | event

No thread waits for the device, except the staged backend for what the host has to read. A job is a coroutine like any
other; each of its steps is taken with the backend's stream as the current one, so that whatever torch does there,
copies,
casts, memory, belongs to that stream.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.base import Backend, Prepared
from hvlike.backends.cuda.runtime import DeviceRuntime, Event, Stream
from hvlike.errors import HorovodInternalError
from hvlike.transport.loop.coroutine import Coroutine, Wait

T = TypeVar("T")


class DeviceBackend(ABC):
    """What the backends of a device have in common. Tensors in host memory (flags, counts) go the host's way."""

    launches = False
    """The first step of a job begins all of it: nothing is left for the loop to do."""

    def __init__(
        self, host: Backend, runtime: DeviceRuntime, device: torch.device, stream: Stream | None = None
    ) -> None:
        """host: the backend of the same op queue for host memory; stream: where jobs run, None for one of its own."""
        self.host = host
        self.runtime = runtime
        self.home: torch.device = device
        """Where the tensors have to be."""
        self.stream: Stream = runtime.new_stream(device) if stream is None else stream
        self.broken: BaseException | None = None

    def prepare(self, lengths: Sequence[int], arithmetic: Arithmetic) -> Prepared | None:
        """See Backend: not the way of this one."""
        return None

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
                with inside():
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

    def fence(self, result: Any = None) -> StreamFence:
        """What a caller passes before it uses the result; `result`: tensors, perhaps in lists, made on the stream."""
        return StreamFence(self, self.runtime.record(self.stream), list(tensors_in(result)))

    def check(self) -> None:
        """Raise what has gone wrong on the device, if anything has."""
        if self.broken is not None:
            raise self.broken

    def watch(self, now: float) -> HorovodInternalError | None:
        """What has gone wrong since, a few times a second; now: of time.monotonic(). In the loop."""
        return None

    def abort(self, error: BaseException) -> None:
        """Do nothing more; who waits, and who asks later, gets `error`. Does not block."""
        self.broken = self.broken or error

    # -- what a backend does ----------------------------------------------------------------------

    def allreduce(self, tensors: Sequence[torch.Tensor], arithmetic: Arithmetic) -> Coroutine[None]:
        """See Backend."""
        if self._is_elsewhere(tensors):
            yield from self.beside(self.host.allreduce(tensors, arithmetic))
        else:
            yield from self._allreduce(tensors, arithmetic)

    def reduce_scatter(
        self, tensors: Sequence[torch.Tensor], owners: Sequence[int], arithmetic: Arithmetic
    ) -> Coroutine[None]:
        """See Backend."""
        if self._is_elsewhere(tensors):
            yield from self.beside(self.host.reduce_scatter(tensors, owners, arithmetic))
        else:
            yield from self._reduce_scatter(tensors, owners, arithmetic)

    def gather(self, tensors: Sequence[torch.Tensor], owners: Sequence[int]) -> Coroutine[None]:
        """See Backend."""
        if self._is_elsewhere(tensors):
            yield from self.beside(self.host.gather(tensors, owners))
        else:
            yield from self._gather(tensors, owners)

    def alltoall(self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> Coroutine[None]:
        """See Backend."""
        if self._is_elsewhere(sends):
            yield from self.beside(self.host.alltoall(sends, receives))
        else:
            yield from self._alltoall(sends, receives)

    def begin_count(self, *, active: bool) -> None:
        """See Backend; hosts count."""
        with self.runtime.aside():
            self.host.begin_count(active=active)

    def end_count(self) -> Coroutine[int]:
        """See Backend."""
        return (yield from self.beside(self.host.end_count()))

    def close(self) -> None:
        """Give back what belongs to the device; the host's backend has its own end."""
        self.abort(RuntimeError("the backend was closed"))

    def _is_elsewhere(self, tensors: Sequence[torch.Tensor]) -> bool:
        return bool(tensors) and tensors[0].device != self.home

    @abstractmethod
    def on_host(
        self, tensors: Sequence[torch.Tensor], work: Callable[[Backend, Sequence[torch.Tensor]], Coroutine[None]]
    ) -> Coroutine[None]:
        """Run `work(host backend, copies in host memory)`, then bring the copies back into the tensors."""

    @abstractmethod
    def _allreduce(self, tensors: Sequence[torch.Tensor], arithmetic: Arithmetic) -> Coroutine[None]: ...

    @abstractmethod
    def _reduce_scatter(
        self, tensors: Sequence[torch.Tensor], owners: Sequence[int], arithmetic: Arithmetic
    ) -> Coroutine[None]: ...

    @abstractmethod
    def _gather(self, tensors: Sequence[torch.Tensor], owners: Sequence[int]) -> Coroutine[None]: ...

    @abstractmethod
    def _alltoall(self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> Coroutine[None]: ...


class StreamFence:
    """Between a backend and a caller that uses its results: the caller's stream waits, the caller does not."""

    __slots__ = ("_backend", "_event", "_tensors")

    def __init__(self, backend: DeviceBackend, event: Event, tensors: list[torch.Tensor]) -> None:
        self._backend = backend
        self._event = event
        self._tensors = tensors

    def __call__(self) -> None:
        """Make the current stream of this thread wait. Raises: what has gone wrong on the device meanwhile."""
        backend = self._backend
        backend.check()
        stream = backend.runtime.current_stream(backend.home)
        backend.runtime.wait(stream, self._event)
        for tensor in self._tensors:
            backend.runtime.keep(tensor, stream)


def tensors_in(value: Any) -> Iterable[torch.Tensor]:
    """The tensors of a result: a tensor, or lists and tuples of them."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each)
