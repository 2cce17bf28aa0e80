"""Large payloads between two ranks of one node, by cross-memory attach: both ranks copy.

With MPI the receiver copies everything while the sender waits. Here the receiver reads from the front and tells the
sender the destination; the sender, if it has time, writes from the back, until the two meet:

    receiver reads ->  |..........  free  ..........|  <- sender writes

Each side claims its next units in a slot of shared memory before it looks at the claims of the other side. So the
sender never writes where the receiver has been. If both let the last unit go, the receiver reads it at the end.

A rank has one slot for what it sends, hence one such payload at a time; the others go by MPI. So does everything
where the system forbids cross-memory attach; hvlike tries it once when it starts.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence

import numpy as np
import torch

from hvlike.system.system import system
from hvlike.transport.loop.coroutine import Coroutine, Wait
from hvlike.transport.memory import process_memory
from hvlike.transport.memory.doorbell import Doorbell, Fence
from hvlike.transport.memory.dtypes import Array
from hvlike.transport.memory.never_freed import SILENT_SENDER, keep_forever

LEAST_BYTES = 1 << 20

_UNIT_BYTES = 64 << 10

_MOST_UNITS = 48
"""Of one claim: the loop has other things to do, too."""

_RECEIVERS_PART = 0.5
"""Of what is free, the receiver, who is there first, claims this much, and the sender all the rest."""

_ALL = 1 << 40
_PATIENCE_SECONDS = 1.0

SLOT_WORDS = 8
_DESTINATION, _READ, _WRITTEN, _SETTLED, _RECEIVED, _REFUSED, _PROBE, _PROBE_VALUE = range(SLOT_WORDS)
# _DESTINATION: where the payload goes in the receiver's memory; 0: it has not said so yet.
# _READ, _WRITTEN: how many units, from the front and from the back, the receiver and the sender have claimed.
# _SETTLED: 1 + how many units the sender has written and will have written; 0: it is not over yet.
# _RECEIVED: the receiver has everything. _REFUSED: it cannot read, and waits for it by MPI.
# _PROBE, _PROBE_VALUE: an address in this rank's memory and what stands there, to try it out.

CopyOffer = tuple[int, int]
"""What the receiver is told: which of the payload's views comes this way, and where it lies in the sender's memory."""


class DirectCopies:
    """The slots of a node's ranks."""

    def __init__(self, table: memoryview, local: dict[int, int], bells: dict[int, Doorbell], rank: int, fence: Fence):
        """table: SLOT_WORDS words a rank, zeroed. local: rank -> index on the node."""
        self._slots = {each: table[index * SLOT_WORDS : (index + 1) * SLOT_WORDS] for each, index in local.items()}
        self._bells = bells
        self._mine = self._slots[rank]
        self._fence = fence
        self._busy = False
        self.enabled = False
        """Whether all ranks of the node can reach each other's memory."""
        self.probe = np.frombuffer(os.urandom(8), np.uint64) >> np.uint64(1)
        """A word of this process that peers read and write once to try whether they can."""
        self._mine[_PROBE] = self.probe.ctypes.data
        self._mine[_PROBE_VALUE] = int(self.probe[0])

    def reaches(self, rank: int) -> bool:
        """Whether this process can read and write the memory of a local rank, which has come as far as this one."""
        slot, found = self._slots[rank], np.zeros(1, np.uint64)
        process, theirs = self._bells[rank].process, slot[_PROBE]
        try:
            process_memory.read(process, theirs, found.ctypes.data, 8)
            if int(found[0]) != slot[_PROBE_VALUE]:
                # A process of another PID namespace has this number, too.
                return False
            process_memory.write(process, theirs, found.ctypes.data, 8)
        except OSError:
            return False
        return True

    def is_free_for(self, rank: int) -> bool:
        """Whether a payload to that rank can go this way now."""
        return self.enabled and not self._busy and rank in self._slots

    def offer(self, rank: int, tensors: Sequence[torch.Tensor]) -> CopyOffer | None:
        """What to tell the receiver of the longest of these tensors; None where they better go by MPI."""
        if not self.is_free_for(rank):
            return None
        index = max(range(len(tensors)), key=lambda place: tensors[place].nbytes)
        return None if tensors[index].nbytes < LEAST_BYTES else (index, tensors[index].data_ptr())

    def take(self) -> None:
        """Take the slot for what was offered; before the receiver is told, `send` must follow."""
        self._busy = True
        for word in (_DESTINATION, _READ, _WRITTEN, _SETTLED, _RECEIVED, _REFUSED):
            self._mine[word] = 0

    def send(
        self, rank: int, view: Array, otherwise: Callable[[], Coroutine[None]], *, patience: Wait = Wait.POLL
    ) -> Coroutine[None]:
        """The sender's part: help to copy, until the receiver has everything; or `otherwise`, where it asks for MPI.
        patience: NOTIFY where the receiver may begin at any time; it rings.
        """
        slot = self._mine
        try:
            while not (slot[_DESTINATION] or slot[_RECEIVED] or slot[_REFUSED]):
                yield patience
            if slot[_DESTINATION]:
                yield from self._write(self._bells[rank].process, slot, view)
            while not (slot[_RECEIVED] or slot[_REFUSED]):
                yield Wait.POLL
            if slot[_REFUSED]:
                yield from otherwise()
        finally:
            self._busy = False

    def _write(self, process: int, slot: memoryview, view: Array) -> Coroutine[None]:
        payload = _Payload(view)
        theirs = slot[_DESTINATION]
        written = 0
        try:
            while units := min(payload.free(slot), _MOST_UNITS):
                slot[_WRITTEN] = written + units
                self._fence()
                if written + units + slot[_READ] > payload.units:
                    break
                start, nbytes = payload.part(payload.units - written - units, units)
                process_memory.write(process, theirs + start, payload.address + start, nbytes)
                written += units
                if payload.free(slot):
                    yield Wait.AGAIN
        except OSError:
            # The receiver reads what is missing, or is gone.
            pass
        finally:
            self._fence()
            slot[_SETTLED] = 1 + written

    def receive(
        self, rank: int, address: int, view: Array, otherwise: Callable[[], Coroutine[None]]
    ) -> Coroutine[None]:
        """Copy what lies at `address` of a local rank into `view`; `otherwise` by MPI, where it cannot be read."""
        slot = self._slots[rank]
        over = False
        try:
            yield from self._read(rank, slot, address, view)
            over = True
            slot[_RECEIVED] = 1
        except OSError:
            slot[_READ] = _ALL
            self._fence()
            yield from self._settled(slot)
            over = True
            slot[_REFUSED] = 1
            yield from otherwise()
        finally:
            if not over:
                self._abandon(slot, view)

    def withdraw(self) -> None:
        """The receiver, which has not begun, will not take what was offered: let the sender's part end."""
        self._mine[_RECEIVED] = 1

    def _read(self, rank: int, slot: memoryview, address: int, view: Array) -> Coroutine[None]:
        process = self._bells[rank].process
        payload = _Payload(view)
        read = 0

        def copy(units: int) -> None:
            start, nbytes = payload.part(read, units)
            process_memory.read(process, address + start, payload.address + start, nbytes)

        while units := min(math.ceil(payload.free(slot) * _RECEIVERS_PART), _MOST_UNITS):
            slot[_READ] = read + units
            self._fence()
            if read + units + slot[_WRITTEN] > payload.units:
                break
            if not read:
                slot[_DESTINATION] = payload.address
                self._bells[rank].ring()
            copy(units)
            read += units
            if payload.free(slot):
                yield Wait.AGAIN
        slot[_READ] = _ALL
        self._fence()
        yield from self._settled(slot)
        written = max(slot[_SETTLED] - 1, 0)
        self._fence()
        if read + written < payload.units:
            copy(payload.units - read - written)

    def _settled(self, slot: memoryview) -> Coroutine[None]:
        """Wait until the sender writes no more; it begins nothing where all pieces are claimed."""
        while slot[_WRITTEN] and not slot[_SETTLED]:
            yield Wait.POLL

    def _abandon(self, slot: memoryview, view: Array) -> None:
        """The transfer is given up here (shutdown): the sender must not write into memory that is freed."""
        slot[_READ] = _ALL
        self._fence()
        until = system.monotonic() + _PATIENCE_SECONDS
        while slot[_WRITTEN] and not slot[_SETTLED]:
            if system.monotonic() > until:
                keep_forever(SILENT_SENDER, view)
                break
        slot[_RECEIVED] = 1


class _Payload:
    def __init__(self, view: Array) -> None:
        self.address: int = view.ctypes.data
        self.units = -(-view.nbytes // _UNIT_BYTES)
        self._nbytes = view.nbytes

    def free(self, slot: memoryview) -> int:
        return max(self.units - slot[_READ] - slot[_WRITTEN], 0)

    def part(self, first: int, units: int) -> tuple[int, int]:
        """Where these units begin and how long they are, in bytes."""
        start = first * _UNIT_BYTES
        return start, min(units * _UNIT_BYTES, self._nbytes - start)
