"""The staged plane: tensors of a GPU travel through pinned host memory and the host's plane.

    stream of the plane   pack |                                     | unpack
    stream down                | piece 0 | piece 1 | piece 2 |       |
    host                                 | reduce 0 | reduce 1 | reduce 2
    stream up                                       | piece 0 | piece 1 | piece 2

For ranks that share a GPU, and where there is no NCCL. The pieces of one call overlap each other, and those of a bucket
of gradients the rest of the backward pass. Whoever begins a call only puts the first copies into a stream; all else is
done in the loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import islice

import torch

from hvlike.planes.arithmetic import Arithmetic
from hvlike.planes.cuda.device_plane import DevicePlane
from hvlike.planes.cuda.pinned import PinnedPool
from hvlike.planes.cuda.runtime import DeviceRuntime, Event, Stream
from hvlike.planes.partition import Message, Run, message_length, messages
from hvlike.planes.plane import Plane
from hvlike.transport.routine import Routine, Wait

PIECE_BYTES = 4 << 20
"""What is copied at once: at 20 GB/s it takes 0.2 ms, many times what it costs to begin a copy."""

AHEAD = 8
"""Pieces of one call that are on their way to the host before the first is reduced."""

Work = Callable[[Message, list[torch.Tensor]], Routine[None]]
"""Done with the copies of some runs, in host memory."""


class StagedPlane(DevicePlane):
    """See the head of this file."""

    def __init__(
        self, host: Plane, runtime: DeviceRuntime, device: torch.device, rank: int, stream: Stream | None = None
    ) -> None:
        """rank: of this process in the group; stream: that of a plane which this one helps out."""
        super().__init__(host, runtime, device, stream)
        self._rank = rank
        self._down = runtime.new_stream(device)
        self._up = runtime.new_stream(device)
        self._pool = PinnedPool(runtime)

    def on_host(
        self, tensors: Sequence[torch.Tensor], work: Callable[[Plane, Sequence[torch.Tensor]], Routine[None]]
    ) -> Routine[None]:
        """See DevicePlane."""

        def whole(runs: Message, copies: list[torch.Tensor]) -> Routine[None]:
            yield from work(self.host, copies)

        everything = range(len(tensors))
        runs = [Run(index, 0, len(tensor)) for index, tensor in enumerate(tensors)]
        yield from self._through(tensors, [runs], everything, everything, whole)

    def _allreduce(self, tensors: Sequence[torch.Tensor], arithmetic: Arithmetic) -> Routine[None]:
        def reduce(runs: Message, copies: list[torch.Tensor]) -> Routine[None]:
            # They lie one after another.
            yield from self.host.allreduce([_as_one(copies)], arithmetic)

        everything = range(len(tensors))
        yield from self._through(tensors, pieces_of(tensors), everything, everything, reduce)

    def _reduce_scatter(
        self, tensors: Sequence[torch.Tensor], owners: Sequence[int], arithmetic: Arithmetic
    ) -> Routine[None]:
        def reduce(runs: Message, copies: list[torch.Tensor]) -> Routine[None]:
            yield from self.host.reduce_scatter(copies, [owners[run.piece] for run in runs], arithmetic)

        own = {index for index, owner in enumerate(owners) if owner == self._rank}
        yield from self._through(tensors, pieces_of(tensors), range(len(tensors)), own, reduce)

    def _gather(self, tensors: Sequence[torch.Tensor], owners: Sequence[int]) -> Routine[None]:
        def write(runs: Message, copies: list[torch.Tensor]) -> Routine[None]:
            yield from self.host.gather(copies, [owners[run.piece] for run in runs])

        own = {index for index, owner in enumerate(owners) if owner == self._rank}
        yield from self._through(tensors, pieces_of(tensors), own, set(range(len(tensors))) - own, write)

    def _alltoall(self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> Routine[None]:
        def exchange(runs: Message, copies: list[torch.Tensor]) -> Routine[None]:
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
    ) -> Routine[None]:
        """Bring pieces to the host, have them worked on, and bring back what was written.

        reads, writes: the tensors whose values the work needs, and those that it changes.
        """
        # Also what is only written here: it may be in use until now. Each piece is waited for before it goes up.
        self.runtime.wait(self._down, self.runtime.record(self.stream))
        waiting = iter(pieces)
        loaded = deque(self._load(tensors, piece, reads) for piece in islice(waiting, AHEAD))
        # What follows is the loop's: the host's plane may only be used there.
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
