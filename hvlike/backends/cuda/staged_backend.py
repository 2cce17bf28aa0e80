"""The staged backend: tensors of a GPU travel through pinned host memory and the host's backend.

    stream of the backend   pack |                                     | unpack
    stream down                | piece 0 | piece 1 | piece 2 |       |
    host                                 | reduce 0 | reduce 1 | reduce 2
    stream up                                       | piece 0 | piece 1 | piece 2

For ranks that share a GPU, and where there is no NCCL. The pieces of one call overlap each other, and those of a bucket
of gradients the rest of the backward pass. Whoever begins a call only puts the first copies into a stream; all else is
done in the loop.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import islice

import torch

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.base import Backend
from hvlike.backends.cuda.device_backend import DeviceBackend
from hvlike.backends.cuda.runtime import DeviceRuntime, Event, Stream
from hvlike.backends.network.partition import Message, Run, message_length, messages
from hvlike.transport.loop.coroutine import Coroutine, Wait


def scale_(tensors: Sequence[torch.Tensor], factor: float) -> None:
    """Multiply flat tensors of one dtype in place; 16-bit floats in float32, integers in double, toward zero."""
    if factor == 1 or not tensors:
        return
    if tensors[0].dtype.is_floating_point or tensors[0].dtype.is_complex:
        torch._foreach_mul_(list(tensors), factor)
        return
    for tensor in tensors:
        tensor.copy_(tensor.double().mul_(factor).trunc_())


SMALLEST = 64 << 10


class PinnedPool:
    """Buffers of a few sizes, powers of two; those that are given back serve the next that asks. Any thread."""

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime
        self._free: dict[int, deque[tuple[torch.Tensor, Event | None]]] = {}
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> torch.Tensor:
        """A buffer of at least `nbytes` bytes; the device does nothing with it any more."""
        size = max(SMALLEST, 1 << (nbytes - 1).bit_length())
        with self._lock:
            free = self._free.setdefault(size, deque())
            # Given back in the order in which the device uses them, so the first is the first to be free.
            if free and (free[0][1] is None or self._runtime.has_passed(free[0][1])):
                return free.popleft()[0]
        return self._runtime.pinned(size)

    def give_back(self, buffer: torch.Tensor, after: Event | None) -> None:
        """Let others have a buffer that `take` gave, once the device has come by `after`."""
        with self._lock:
            self._free.setdefault(buffer.numel(), deque()).append((buffer, after))


PIECE_BYTES = 4 << 20
"""What is copied at once: at 20 GB/s it takes 0.2 ms, many times what it costs to begin a copy."""

AHEAD = 8
"""Pieces of one call that are on their way to the host before the first is reduced."""

Work = Callable[[Message, list[torch.Tensor]], Coroutine[None]]
"""Done with the copies of some runs, in host memory."""


class StagedBackend(DeviceBackend):
    """See the head of this file."""

    def __init__(
        self, host: Backend, runtime: DeviceRuntime, device: torch.device, rank: int, stream: Stream | None = None
    ) -> None:
        """rank: of this process in the group; stream: that of a backend which this one helps out."""
        super().__init__(host, runtime, device, stream)
        self._rank = rank
        self._down = runtime.new_stream(device)
        self._up = runtime.new_stream(device)
        self._pool = PinnedPool(runtime)

    def on_host(
        self, tensors: Sequence[torch.Tensor], work: Callable[[Backend, Sequence[torch.Tensor]], Coroutine[None]]
    ) -> Coroutine[None]:
        """See DeviceBackend."""

        def whole(runs: Message, copies: list[torch.Tensor]) -> Coroutine[None]:
            yield from work(self.host, copies)

        everything = range(len(tensors))
        runs = [Run(index, 0, len(tensor)) for index, tensor in enumerate(tensors)]
        yield from self._through(tensors, [runs], everything, everything, whole)

    def _allreduce(self, tensors: Sequence[torch.Tensor], arithmetic: Arithmetic) -> Coroutine[None]:
        def reduce(runs: Message, copies: list[torch.Tensor]) -> Coroutine[None]:
            # They lie one after another.
            yield from self.host.allreduce([_as_one(copies)], arithmetic)

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
        runs = [Run(index, 0, len(tensor)) for index, tensor in enumerate(tensors)]
        yield from self._through(tensors, [runs], range(len(sends)), range(len(sends), len(tensors)), exchange)

    # -- down, work, up -------------------------------------------------------------------------

    def _through(
        self,
        tensors: Sequence[torch.Tensor],
        pieces: Sequence[Message],
        reads: Collection[int],
        writes: Collection[int],
        work: Work,
    ) -> Coroutine[None]:
        """Bring pieces to the host, have them worked on, and bring back what was written.

        reads, writes: the tensors whose values the work needs, and those that it changes.
        """
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
            self._unload(tensors, piece, writes)
            loaded.extend(self._load(tensors, each, reads) for each in islice(waiting, 1))
        self.runtime.wait(self.stream, self.runtime.record(self._up))

    def _load(self, tensors: Sequence[torch.Tensor], runs: Message, reads: Collection[int]) -> _Piece:
        dtype = tensors[runs[0].piece].dtype if runs else torch.uint8
        buffer = self._pool.take(max(1, message_length(runs) * dtype.itemsize))
        piece = _Piece(runs, buffer, dtype)
        with self.runtime.use(self._down):
            for run, copy in zip(runs, piece.copies, strict=True):
                if run.piece in reads and len(copy):
                    self.runtime.copy(copy, tensors[run.piece][run.start : run.stop])
        piece.ready = self.runtime.record(self._down)
        return piece

    def _unload(self, tensors: Sequence[torch.Tensor], piece: _Piece, writes: Collection[int]) -> None:
        with self.runtime.use(self._up):
            for run, copy in zip(piece.runs, piece.copies, strict=True):
                if run.piece in writes and len(copy):
                    self.runtime.copy(tensors[run.piece][run.start : run.stop], copy)
        self._pool.give_back(piece.buffer, self.runtime.record(self._up))


class _Piece:
    """Some runs, and their copies one after another in pinned memory."""

    __slots__ = ("buffer", "copies", "ready", "runs")

    def __init__(self, runs: Message, buffer: torch.Tensor, dtype: torch.dtype) -> None:
        self.runs = runs
        self.buffer = buffer
        flat = buffer[: message_length(runs) * dtype.itemsize].view(dtype)
        self.copies = list(torch.split(flat, [run.stop - run.start for run in runs]))
        self.ready: Event = None
        """Where the copies hold the values."""


def pieces_of(tensors: Sequence[torch.Tensor]) -> list[Message]:
    """Cut tensors of one dtype into pieces, the same on all ranks."""
    if not tensors:
        return []
    runs = [Run(index, 0, len(tensor)) for index, tensor in enumerate(tensors)]
    return messages(runs, PIECE_BYTES // tensors[0].element_size())


def _as_one(copies: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors that lie one after another, as one."""
    return copies[0].as_strided((sum(map(len, copies)),), (1,))


class SoloDeviceBackend(StagedBackend):
    """Nothing leaves the device, except what has to be computed by the host."""

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
