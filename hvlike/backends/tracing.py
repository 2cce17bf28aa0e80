"""A backend that records its calls in the timeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.base import Backend, Prepared
from hvlike.observe.recorder import Recorder
from hvlike.transport.loop.coroutine import Coroutine

_NOTHING: AbstractContextManager[None] = nullcontext()


class TracedBackend:
    """Does what the backend does; each call is a phase in one row of the timeline, SHARED_ALLREDUCE for example."""

    def __init__(self, backend: Backend, recorder: Recorder, row: int) -> None:
        self.backend = backend
        self._recorder = recorder
        self._row = row
        self._kind = type(backend).__name__.removesuffix("Backend").upper()

    def over(self, backend: Backend) -> TracedBackend:
        """Another backend in the same row."""
        return TracedBackend(backend, self._recorder, self._row)

    @contextmanager
    def phase(self, name: str, nbytes: int) -> Iterator[None]:
        """What is done meanwhile is a phase of this name."""
        self._recorder.begin(self._row, name, {"bytes": nbytes})
        try:
            yield
        finally:
            self._recorder.end(self._row)

    def allreduce(self, tensors: Sequence[torch.Tensor], arithmetic: Arithmetic) -> Coroutine[None]:
        """See Backend."""
        with self.phase(f"{self._kind}_ALLREDUCE", total_bytes(tensors)):
            yield from self.backend.allreduce(tensors, arithmetic)

    def prepare(self, lengths: Sequence[int], arithmetic: Arithmetic) -> Prepared | None:
        """See Backend; whoever runs it records that."""
        return self.backend.prepare(lengths, arithmetic)

    def reduce_scatter(
        self, tensors: Sequence[torch.Tensor], owners: Sequence[int], arithmetic: Arithmetic
    ) -> Coroutine[None]:
        """See Backend."""
        with self.phase(f"{self._kind}_REDUCE_SCATTER", total_bytes(tensors)):
            yield from self.backend.reduce_scatter(tensors, owners, arithmetic)

    def gather(self, tensors: Sequence[torch.Tensor], owners: Sequence[int]) -> Coroutine[None]:
        """See Backend."""
        with self.phase(f"{self._kind}_GATHER", total_bytes(tensors)):
            yield from self.backend.gather(tensors, owners)

    def alltoall(self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> Coroutine[None]:
        """See Backend."""
        with self.phase(f"{self._kind}_ALLTOALL", total_bytes(sends)):
            yield from self.backend.alltoall(sends, receives)

    def begin_count(self, *, active: bool) -> None:
        """See Backend."""
        self.backend.begin_count(active=active)

    def end_count(self) -> Coroutine[int]:
        """See Backend."""
        with self.phase("COUNT_ACTIVE_RANKS", 0):
            return (yield from self.backend.end_count())

    def close(self) -> None:
        """See Backend."""
        self.backend.close()


def phase(backend: Backend, name: str, tensors: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
    """A phase in the row of `backend`, if it has one; nothing otherwise."""
    return backend.phase(name, total_bytes(tensors)) if isinstance(backend, TracedBackend) else _NOTHING


def total_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """The size of all tensors together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
