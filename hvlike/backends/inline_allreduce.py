"""The inline allreduce: a reduction in the calling thread, at once, when all ranks of a node call it now.

The board (shared_memory/board.py) shows whether they do. A small tensor lies beside its entry on the board: a rank that
sees all entries reduces the copies of all ranks by itself, in the same order. A large tensor takes the chunked
reduction of an op queue of its own. The calling thread drives it as long as something moves; the loop does the rest.
"""

from __future__ import annotations

from hvlike.backends.arithmetic.arithmetic import Arithmetic, Piece
from hvlike.backends.op_queue import OpQueue
from hvlike.backends.shared_memory.board import RING, WORDS, Board
from hvlike.backends.shared_memory.in_place_shm import InlineReduction
from hvlike.backends.shared_memory.shared_backend import SharedBackend
from hvlike.system.mapped_memory import Segment
from hvlike.system.system import system
from hvlike.transport.fabric import Fabric
from hvlike.transport.loop.coroutine import Coroutine
from hvlike.transport.loop.spin import CHECKS
from hvlike.transport.memory.doorbell import BELL_BYTES, Doorbell
from hvlike.transport.world import Group

COPIED_BYTES = 1536 << 10
"""Bytes of the copies of all ranks up to which every rank reduces them: that costs less than a round trip."""

_LARGEST_COPY = 640 << 10
_LEAST_IN_PLACE = 256 << 10
_SMALLEST_COPY = 16 << 10

WAIT_SECONDS = 0.05
"""How long a rank waits on the board. Then it tells the others to hurry."""

_BLOCK_BYTES = -(-8 * WORDS // 128) * 128
_NAP_SECONDS = 2e-3


class InlineEngine:
    """What one rank has of it, for one thread at a time. Ranks count within the group; all are on this node."""

    def __init__(self, fabric: Fabric, group: Group, queue: OpQueue, segment: Segment) -> None:
        size, rank = group.size, group.rank
        self.queue = queue
        self._rank = rank
        self._size = size
        self._spin = fabric.spin
        bells = [Doorbell(segment, each, fabric.fence) for each in range(size)]
        self._bell = bells[rank]
        self.others = [bell for each, bell in enumerate(bells) if each != rank]
        """The bells of the peers."""
        self._bell.initialise(system.process())
        start = size * BELL_BYTES
        blocks = [system.words(segment, start + each * _BLOCK_BYTES, WORDS) for each in range(size)]
        order, looks = None if system.orders_stores else fabric.fence, fabric.spin.board_checks
        self.board = Board(blocks, rank, fabric.fence.barrier, order, self.wake, looks)
        start += size * _BLOCK_BYTES
        self._room = room = _copy_bytes(size)
        self._slots = [
            [segment.array[at : at + room] for at in range(first, first + RING * room, room)]
            for first in range(start, start + size * RING * room, RING * room)
        ]

    def is_small(self, nbytes: int) -> bool:
        """Whether every rank reduces a tensor of so many bytes by itself."""
        return nbytes <= self._room

    def copies(self, arithmetic: Arithmetic, elements: int) -> list[list[Piece]]:
        """For each place on the board the memory of all ranks' copies of a small tensor."""
        nbytes = elements * arithmetic.itemsize
        return [[arithmetic.over(slots[place][:nbytes]) for slots in self._slots] for place in range(RING)]

    def slots(self, nbytes: int) -> tuple[memoryview, ...]:
        """For each place on the board the memory of this rank's copy, in bytes."""
        return tuple(slot[:nbytes].data for slot in self._slots[self._rank])

    def wake(self) -> None:
        """Wake the peers that sleep."""
        for bell in self.others:
            bell.notify_if_sleeping()

    def wait(self, index: int) -> bool | None:
        """Wait for the answer about operation number `index`, which this rank has offered; None after WAIT_SECONDS."""
        self.wake()
        look = self.board.look
        for _ in range(CHECKS):
            answer = look(index)
            if answer is not None:
                return answer
            if self._spin.crowded:
                # The rank that is waited for may need this core.
                system.yield_core()
        until = system.monotonic() + WAIT_SECONDS
        while system.monotonic() < until:
            self.board.set_asleep(True)
            self._bell.prepare_sleep()
            try:
                answer = look(index)
                if answer is not None:
                    return answer
                self._bell.sleep(_NAP_SECONDS)
            finally:
                self._bell.awake()
                self.board.set_asleep(False)
        return None

    def at_once(self, arithmetic: Arithmetic, elements: int, number: int) -> InlineReduction | None:
        """What reduces a large tensor, and one of middling size in shared memory; None for others.

        number: the same on all ranks for the same kind of call.
        """
        backend, nbytes = self.queue.backend, elements * arithmetic.itemsize
        if not isinstance(backend, SharedBackend) or (nbytes <= _LEAST_IN_PLACE and self.is_small(nbytes)):
            return None
        return backend.inline(arithmetic, elements, number)


def _copy_bytes(ranks: int) -> int:
    """The largest tensor that every rank reduces by itself: 640 KiB for two ranks, 384 for four, 192 for eight."""
    return max(_SMALLEST_COPY, min(_LARGEST_COPY, COPIED_BYTES // ranks // 4096 * 4096))


def open_inline_allreduce(fabric: Fabric, group: Group, queue: OpQueue) -> Coroutine[InlineEngine | None]:
    """Prepare inline allreduces of a group that is on one node; None where its ranks cannot share the memory.

    queue: one that nothing else uses. Collective over the group.
    """
    size = group.size
    nbytes = size * (_BLOCK_BYTES + BELL_BYTES + RING * _copy_bytes(size))
    segment = yield from fabric.share(group, ("inline", group.number), nbytes)
    return None if segment is None else InlineEngine(fabric, group, queue, segment)
