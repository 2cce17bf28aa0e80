"""One tensor of middling size, reduced through the staging slots (picture: shared.py) with everything prepared before.

What Reduction does for any tensors, for one where such a tensor has been before: its chunks and the slots they go
through are sliced once, and all steps are in one frame. Where caches are cold, as after a backward, that counts for
more than the copies that ProcessMemory would save.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from hvlike.planes.arithmetic import Arithmetic, Piece
from hvlike.planes.chunks import SLOTS, SMALLEST_SHARE, Turns, cut, fitting
from hvlike.planes.reduction import LOOKS, join_in_order
from hvlike.planes.region import REDUCED, Region, first_peer
from hvlike.transport.routine import Routine, Wait

MOST_BYTES = 4 << 20
"""Of a tensor: for larger ones the copies cost more than the calls."""

_CHUNK_BYTES = 128 << 10
"""Half a slot: with more chunks the ranks wait less for the first one."""


class _Foreign(NamedTuple):
    """A chunk that another rank owns."""

    elements: Piece
    owner: int
    place: int
    """Among the chunks of its owner."""
    slots: list[Any]
    """Where it is staged, by turn modulo SLOTS."""
    results: list[Any]
    """Where the result is taken from."""


class _Own(NamedTuple):
    """A chunk that this rank reduces."""

    elements: Piece
    copies: list[list[Piece]]
    """What the peers have staged, by turn modulo SLOTS."""


class StagedReduction:
    """The chunks of a tensor at one address. They keep no memory: the caller holds the tensor that is there now."""

    def __init__(
        self, region: Region, turns: Turns, arithmetic: Arithmetic, own: Piece, check: Callable[[], None]
    ) -> None:
        """turns: of the reductions of the region. check: raises when a peer has given the region up."""
        self._region = region
        self._turns = turns
        self._arithmetic = arithmetic
        self._check = check
        self._looks = 1 if region.crowded else LOOKS
        self._deliver: Callable[[Any, Any], None] = (arithmetic.joining or arithmetic).deliver
        self._counts = [0] * region.ranks
        self._own: list[_Own] = []
        self._foreign: list[_Foreign] = []
        self._cut(own)
        self._readers = [
            [counters for each, counters in enumerate(region.counters) if each != owner]
            if first_peer(owner) == region.rank != owner
            else []
            for owner in range(region.ranks)
        ]
        """For each owner: who takes its results, where they are in this rank's slots."""

    def _cut(self, own: Piece) -> None:
        region, itemsize = self._region, self._arithmetic.itemsize
        largest = min(_CHUNK_BYTES, region.chunk) // itemsize
        slots = region.slots(self._arithmetic)
        elements = fitting(len(own), largest, SMALLEST_SHARE // itemsize, region.ranks)
        for number, (_, start, stop) in enumerate(cut([len(own)], elements)):
            owner, size = number % region.ranks, stop - start
            if owner == region.rank:
                copies = [[slot[:size] for slot in staged] for staged in slots.copies]
                self._own.append(_Own(own[start:stop], copies))
            else:
                staged = [slot[:size] for slot in slots.staged[owner]]
                results = [slot[:size] for slot in slots.results[owner]]
                self._foreign.append(_Foreign(own[start:stop], owner, self._counts[owner], staged, results))
            self._counts[owner] += 1

    # All in one frame: where the caches are cold a call costs more than most statements.
    def run(self) -> Routine[None]:
        """Reduce; all ranks have agreed to it. Raises: MismatchError when a peer has given the region up."""
        region, own, foreign, readers = self._region, self._own, self._foreign, self._readers
        mine, counters, others, order, rank = region.mine, region.counters, region.others, region.order, region.rank
        arithmetic, deliver, quietly = self._arithmetic, self._deliver, region.quiet.run
        bases = self._turns.advance(self._counts)
        staged = reduced = taken = looks = 0
        try:
            while taken < len(foreign) or reduced < len(own):
                looks += 1
                if staged < len(foreign):
                    elements, owner, place, slots, _ = foreign[staged]
                    turn = bases[owner] + place
                    needed = turn - SLOTS + 1
                    free = needed <= 0 or counters[owner].words[REDUCED] >= needed
                    for reader in readers[owner]:
                        free = free and (needed <= 0 or reader.taken[owner] >= needed)
                    if free:
                        slots[turn % SLOTS][...] = elements
                        order()
                        mine.staged[owner] = turn + 1
                        staged += 1
                        looks = 0
                if reduced < len(own):
                    turn, there = bases[rank] + reduced, True
                    for other in others:
                        there = there and other.staged[rank] > turn
                    if there:
                        order()
                        elements, copies = own[reduced]
                        quietly(join_in_order, arithmetic, rank, elements, copies[turn % SLOTS])
                        order()
                        mine.words[REDUCED] = turn + 1
                        reduced += 1
                        looks = 0
                if taken < staged:
                    elements, owner, place, _, results = foreign[taken]
                    turn = bases[owner] + place
                    if counters[owner].words[REDUCED] > turn:
                        order()
                        quietly(deliver, elements, results[turn % SLOTS])
                        order()
                        mine.taken[owner] = turn + 1
                        taken += 1
                        looks = 0
                if not looks:
                    for bell in region.sleepers:
                        bell.nudge()
                elif looks % self._looks == 0:
                    # A peer that was about to sleep when it was looked at is woken now, or has looked once more.
                    region.nudge(region.peers)
                    self._check()
                    yield Wait.BELL
        except BaseException:
            # The peers would wait for these chunks for ever.
            mine.failed = 1
            raise
        finally:
            region.nudge(region.peers)
