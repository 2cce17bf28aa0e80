"""What every backend can do, the backend of a rank that is alone, and one that records its calls in the timeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.observe.recorder import Recorder
from hvlike.transport.loop.coroutine import Coroutine

INCOMPLETE = 1 << 20
"""What a rank adds to its 1 where it is active and lacks some of its tensors: zeros stand for these."""

FAILED = 1 << 40
"""What a rank adds whose own work between two collectives has failed."""


def active_ranks(count: int) -> int:
    """How many ranks are active, by the sum of what they have said."""
    return count % INCOMPLETE


class PreparedReduction(Protocol):
    """Reduces tensors of the same lengths each time. All ranks prepare and run the same, in the same order."""

    def run(self, addresses: list[int], active: int | None, tensors: Sequence[torch.Tensor]) -> Coroutine[int]:
        """Reduce tensors in place; returns the sum of all `active`.

        tensors: dense, of the dtype of the reduction, where the backend has its tensors. They live on if a rank gives
        up while they may still be written to. addresses: where they begin. active: 1 where this rank has tensors of
        its own, or 1 + INCOMPLETE, and 0 where it has zeros, as it has joined. None: no rank asks for the sum.
        Raises: MismatchError where a peer is at other work; HorovodInternalError where a peer has given up.
        """


class Backend(Protocol):
    """Reduces and moves flat contiguous tensors among the ranks of a group, one call at a time, in the same order."""

    name: str  # In the timeline

    def allreduce(self, tensors: Sequence[torch.Tensor], arithmetic: Arithmetic) -> Coroutine[None]:
        """Reduce in place; the same lengths on every rank; bitwise the same result everywhere."""

    def prepare(self, lengths: Sequence[int], arithmetic: Arithmetic) -> PreparedReduction:
        """What reduces tensors of these lengths, none 0, where they are; the same on every rank."""

    def reduce_scatter(
        self, tensors: Sequence[torch.Tensor], owners: Sequence[int], arithmetic: Arithmetic
    ) -> Coroutine[None]:
        """Reduce each tensor on the rank `owners[i]` of the group, in place; the others' are only read."""

    def gather(self, tensors: Sequence[torch.Tensor], owners: Sequence[int]) -> Coroutine[None]:
        """Write each tensor of bytes from the rank `owners[i]` of the group to all others."""

    def alltoall(self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> Coroutine[None]:
        """Send `sends[i]` to position i of the group and fill `receives[i]` from there; the own part is copied.
        Tensors of bytes, of any length, also 0; what one position sends is as long as what the other receives.
        """

    def count_active(self, active: int) -> Coroutine[int]:
        """The sum of what all ranks say, as in PreparedReduction.run; all call it at the same point."""

    def close(self) -> None:
        """Give back what the backend holds."""


class SoloReduction:
    """A PreparedReduction of one rank."""

    def __init__(self, arithmetic: Arithmetic) -> None:
        self._arithmetic = arithmetic

    def run(self, addresses: list[int], active: int | None, tensors: Sequence[torch.Tensor]) -> Coroutine[int]:
        for tensor in tensors:
            self._arithmetic.combine(self._arithmetic.view(flat_of(tensor)), [])
        yield from ()
        return active or 0


class SoloBackend:
    """A group of one rank: only the factors are left to apply."""

    name = "SOLO"

    def prepare(self, lengths: Sequence[int], arithmetic: Arithmetic) -> PreparedReduction:
        return SoloReduction(arithmetic)

    def allreduce(self, tensors: Sequence[torch.Tensor], arithmetic: Arithmetic) -> Coroutine[None]:
        yield from SoloReduction(arithmetic).run([], None, tensors)

    def reduce_scatter(
        self, tensors: Sequence[torch.Tensor], owners: Sequence[int], arithmetic: Arithmetic
    ) -> Coroutine[None]:
        yield from self.allreduce(tensors, arithmetic)

    def gather(self, tensors: Sequence[torch.Tensor], owners: Sequence[int]) -> Coroutine[None]:
        yield from ()

    def alltoall(self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> Coroutine[None]:
        receives[0].copy_(sends[0])
        yield from ()

    def count_active(self, active: int) -> Coroutine[int]:
        yield from ()
        return int(active)

    def close(self) -> None:
        """Nothing is held."""


def _traced(method: str) -> Callable[..., Coroutine[None]]:
    """A method of TracedBackend: the backend's own, in a phase that is named after both."""

    def call(self: TracedBackend, tensors: Sequence[torch.Tensor], *others: Any) -> Coroutine[None]:
        with self.phase(f"{self.name}_{method.upper()}", total_bytes(tensors)):
            yield from getattr(self.backend, method)(tensors, *others)

    return call


class TracedBackend:
    """Does what the backend does; each call is a phase in one row of the timeline, SHARED_ALLREDUCE for example."""

    def __init__(self, backend: Backend, recorder: Recorder, row: int) -> None:
        self.backend = backend
        self.name = backend.name
        # Whoever runs what was prepared records that.
        self.prepare = backend.prepare
        self.close = backend.close
        self._recorder = recorder
        self._row = row

    def over(self, backend: Backend) -> TracedBackend:
        return TracedBackend(backend, self._recorder, self._row)

    @contextmanager
    def phase(self, name: str, nbytes: int) -> Iterator[None]:
        self._recorder.begin(self._row, name, {"bytes": nbytes})
        try:
            yield
        finally:
            self._recorder.end(self._row)

    allreduce = _traced("allreduce")
    reduce_scatter = _traced("reduce_scatter")
    gather = _traced("gather")
    alltoall = _traced("alltoall")

    def count_active(self, active: int) -> Coroutine[int]:
        with self.phase("COUNT_ACTIVE_RANKS", 0):
            return (yield from self.backend.count_active(active))


def ordinary(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor without gradient that any thread may write, in the caller's inference mode or not."""
    source = tensor.detach()
    if not source.is_inference():
        return source
    with torch.inference_mode(False):
        place = torch.empty(0, dtype=source.dtype, device=source.device)
        place.set_(source.untyped_storage(), source.storage_offset(), source.shape, source.stride())
        # Conjugates and negatives that are not yet computed are views of memory with the other values.
        place = place.conj() if source.is_conj() else place
        return torch._neg_view(place) if source.is_neg() else place


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as bytes, which any thread may write. A view as another dtype is of the caller's mode."""
    if not torch.is_inference_mode_enabled():
        return tensor.view(torch.uint8)
    with torch.inference_mode(False):
        return tensor.view(torch.uint8)


def flat_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor, in their order in memory."""
    return ordinary(tensor).as_strided((tensor.numel(),), (1,))


_NOTHING: AbstractContextManager[None] = nullcontext()


def phase(backend: Backend, name: str, tensors: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
    """A phase in the row of `backend`, if it has one; nothing otherwise."""
    return backend.phase(name, total_bytes(tensors)) if isinstance(backend, TracedBackend) else _NOTHING


def total_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
