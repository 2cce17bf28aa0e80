"""Reductions that begin as soon as all ranks have agreed to them: of one large tensor, on the express way.

    foretell    where the tensor of this rank lies; then the ranks agree
    begin       after a yes: all have arrived, and nobody is waited for until the chunks are done

What depends on the kind of the call alone is made once, what depends on a place in shared memory once for that place.
"""

from __future__ import annotations

import torch

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.shared_memory.algorithm_choice import STAGED, AlgorithmChoice, Use
from hvlike.backends.shared_memory.in_place_shm import AllocationPlace, InPlaceReduction, SharedAllocations, place_word
from hvlike.backends.shared_memory.region import Region
from hvlike.backends.shared_memory.staging import StagedReduction
from hvlike.backends.shared_memory.work_sync import WorkSync, kept
from hvlike.transport.loop.coroutine import Coroutine

MOST_STAGED = 4 << 20
"""Bytes of a tensor that is always staged, which takes the fewest steps."""

MOST_WORKS = 64
"""What is kept for one allocation; with one more all is made anew."""

AS_SHARED, AS_STAGED = 1, 2
"""How a call is done, in the number that ranks compare."""


class InlineReduction:
    """Calls of one kind: tensors of one dtype and length under one arithmetic."""

    def __init__(
        self,
        meeting: WorkSync,
        region: Region,
        direct: SharedAllocations,
        staged: StagedReduction | None,
        fastest: AlgorithmChoice,
        arithmetic: Arithmetic,
        length: int,
        stamp: int,
    ) -> None:
        """staged, fastest: what reduces such a tensor; the first up to MOST_STAGED, without its being foretold.

        stamp: of this kind of call, the same on all ranks.
        """
        self._meeting = meeting
        self._region = region
        self._direct = direct
        self._allocations = direct.allocations
        self._shared = direct.allocations.by_start
        self._fastest = fastest
        self._arithmetic = arithmetic
        self._stamp = stamp
        self._nbytes = length * arithmetic.itemsize
        self._in_place: InPlaceReduction | None = None
        self._address = 0
        self._use: Use = STAGED
        self.staged = staged

    def is_shared(self, address: int) -> bool:
        """Whether a tensor there lies in a shared allocation."""
        return bool(self._shared) and self._allocations.find(address, self._nbytes) is not None

    def foretell(self, address: int, number: int) -> int:
        """Say where this rank's tensor lies, contiguous in host memory; before it offers to begin.

        Returns the number to offer, where `number` is that of the kind of call: ranks that would do it in different
        ways hear a no, as those do whose kinds of calls differ.
        """
        self._region.mine.addresses[0] = self._address = address
        self._use = self._fastest.next
        found = self._allocations.find(address, self._nbytes) if self._shared else None
        if found is None:
            self._in_place, word = None, 0
        else:
            # The entry holds this object, so that the id stays what it is.
            works, key = found[0].works, (found[1], id(self))
            if key not in works:
                if len(works) >= MOST_WORKS:
                    works.clear()
                works[key] = (*self._prepare(AllocationPlace(*found)), self)
            self._in_place, word, _ = works[key]
        self._meeting.foretell(self._stamp, word)
        return number ^ AS_STAGED if self._use.staged else number

    def _prepare(self, place: AllocationPlace) -> tuple[InPlaceReduction | None, int]:
        """What reduces a place of a shared allocation, and the word that says which; None, 0 if not all have it."""
        if not self._direct.has(place.allocation):
            return None, 0
        copies = self._direct.copies(place, self._nbytes, self._arithmetic)
        return InPlaceReduction(self._region, self._arithmetic, [copies], 0), place_word({0: place})

    def begin(self, tensor: torch.Tensor) -> Coroutine[None]:
        """The reduction of what was foretold, after all have agreed."""
        reduction, self._in_place = self._in_place, None
        number = self._meeting.enter()
        if reduction is not None and self._region.is_same_place(number):
            reduction.begin(number)
            return self._meeting.in_place(reduction, number)
        return self._reduce(tensor, self._address, number)

    def forget(self) -> None:
        """The ranks have not agreed: nothing is kept of the tensor's memory."""
        self._in_place = None

    def keep(self, tensor: torch.Tensor) -> None:
        """This rank has left a call that the others may go on with: they may reach into its tensor for ever."""
        kept.append([tensor])

    def _reduce(self, tensor: torch.Tensor, address: int, number: int) -> Coroutine[None]:
        try:
            yield from self._fastest.reduce(self._use, [address], number)
        except BaseException:
            self._meeting.abandon([tensor], number)
            raise
