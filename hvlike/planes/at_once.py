"""Reductions that begin as soon as all ranks have agreed to them: of one large tensor, on the express way.

    foretell    where the tensor of this rank lies; then the ranks agree
    begin       after a yes: all have arrived, and nobody is waited for until the chunks are done

What depends on the kind of the call alone is made once, what depends on a place in shared memory once for that place.
"""

from __future__ import annotations

import torch

from hvlike.planes.arithmetic import Arithmetic
from hvlike.planes.at_once_staged import MOST_BYTES, StagedReduction
from hvlike.planes.chunks import Turns
from hvlike.planes.direct import Direct, DirectReduction, Place, place_word
from hvlike.planes.meeting import Meeting, kept
from hvlike.planes.peer_memory import PeerMemory, PeerReduction
from hvlike.planes.region import PLACES, Region
from hvlike.transport.dtypes import bytes_at
from hvlike.transport.routine import Routine

MOST_WORKS = 64
"""What is kept for one allocation; with one more all is made anew."""


class AtOnce:
    """Calls of one kind: tensors of one dtype and length under one arithmetic."""

    def __init__(
        self,
        meeting: Meeting,
        region: Region,
        direct: Direct,
        memory: PeerMemory,
        turns: Turns,
        arithmetic: Arithmetic,
        length: int,
        stamp: int,
    ) -> None:
        """turns: of the reductions of the region. stamp: of this kind of call, the same on all ranks."""
        self._meeting = meeting
        self._region = region
        self._direct = direct
        self._allocations = direct.allocations
        self._shared = direct.allocations.by_start
        self._memory = memory
        self._turns = turns
        self._arithmetic = arithmetic
        self._stamp = stamp
        self._length = length
        self._nbytes = length * arithmetic.itemsize
        self._reaches = memory.reaches(self._nbytes)
        self._in_peers: PeerReduction | None = None
        self._in_place: DirectReduction | None = None

    def is_shared(self, address: int) -> bool:
        """Whether a tensor there lies in a shared allocation."""
        return bool(self._shared) and self._allocations.find(address, self._nbytes) is not None

    def staged(self, address: int) -> StagedReduction | None:
        """What reduces a tensor there, contiguous in host memory, without being foretold; None for a large one."""
        if self._nbytes > MOST_BYTES:
            return None
        own = self._arithmetic.over(bytes_at(address, self._nbytes))
        return StagedReduction(self._region, self._turns, self._arithmetic, own, self._meeting.check_peers)

    def foretell(self, address: int) -> None:
        """Say where this rank's tensor lies, contiguous in host memory; before it offers to begin."""
        self._region.mine.addresses[0] = address
        found = self._allocations.find(address, self._nbytes) if self._shared else None
        if found is None:
            self._in_place, word = None, 0
        else:
            # The entry holds this object, so that the id stays what it is.
            works, key = found[0].works, (found[1], id(self))
            if key not in works:
                if len(works) >= MOST_WORKS:
                    works.clear()
                works[key] = (*self._prepare(Place(*found)), self)
            self._in_place, word, _ = works[key]
        self._meeting.foretell(self._stamp, word)

    def _prepare(self, place: Place) -> tuple[DirectReduction | None, int]:
        """What reduces a place of a shared allocation, and the word that says which; None, 0 if not all have it."""
        if not self._direct.has(place.allocation):
            return None, 0
        copies = self._direct.copies(place, self._nbytes, self._arithmetic)
        return DirectReduction(self._region, self._arithmetic, [copies], 0), place_word({0: place})

    def begin(self, tensor: torch.Tensor) -> Routine[None] | None:
        """The reduction of what was foretold, after all have agreed; None where the ranks cannot reach all copies."""
        reduction, self._in_place = self._in_place, None
        if reduction is not None and self._is_same_place():
            number = self._meeting.enter()
            reduction.begin(number)
            return self._meeting.in_place(reduction, number)
        return self._reduce_in_peers(tensor) if self._reaches else None

    def forget(self) -> None:
        """The ranks have not agreed: nothing is kept of the tensor's memory."""
        self._in_place = None

    def keep(self, tensor: torch.Tensor) -> None:
        """This rank has left a call that the others may go on with: they may reach into its tensor for ever."""
        if self._reaches:
            kept.append([tensor])

    def _is_same_place(self) -> bool:
        """Whether all ranks have foretold the same place."""
        word = PLACES + (self._meeting.number + 1) % 2
        place = self._region.mine.words[word]
        return all(counters.words[word] == place for counters in self._region.others)

    def _reduce_in_peers(self, tensor: torch.Tensor) -> Routine[None]:
        meeting, reduction = self._meeting, self._in_peers
        number = meeting.enter()
        if reduction is None:
            reduction = self._in_peers = PeerReduction(self._region, self._memory, self._arithmetic, [self._length])
        reduction.begin(number)
        try:
            yield from meeting.in_peers(reduction, number)
        except BaseException:
            meeting.abandon([tensor], number)
            raise
