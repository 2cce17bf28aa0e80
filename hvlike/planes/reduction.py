"""One reduction among the ranks of a node: what is left to stage, to reduce and to take (picture: shared.py)."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

from hvlike.planes.arithmetic import Arithmetic, Piece
from hvlike.planes.chunks import SLOTS, Chunk
from hvlike.planes.region import Region, first_peer

PASSES = 16
"""How often a reduction moves something before it lets other routines have a turn."""

LOOKS = 30
"""How often it looks for what a peer is about to finish before it lets the loop wait: some 10 us, less than a turn."""


class Results(enum.Enum):
    """Who gets the result of a reduction."""

    TO_ALL = "every rank"
    TO_OWNER = "the owner of the chunk"
    PARTIAL = "the owner of the chunk, who is not yet through with it"


class Reduction:
    """The chunks of one piece of work, in their order; this rank stages, reduces and takes as soon as it may."""

    def __init__(
        self,
        region: Region,
        arithmetic: Arithmetic,
        pieces: Sequence[Piece],
        chunks: Sequence[Chunk],
        results: Results,
        compare: Callable[[], None],
    ) -> None:
        """compare: called once, before this rank adds anything: raises if a peer is at other work."""
        rank = region.rank
        self._region = region
        self._arithmetic = arithmetic
        self._pieces = pieces
        self._results = results
        self._compare: Callable[[], None] | None = compare
        self._foreign = [chunk for chunk in chunks if chunk.owner != rank]
        self._own = [chunk for chunk in chunks if chunk.owner == rank]
        self._staged = 0
        self._reduced = 0
        self._taken = 0 if results is Results.TO_ALL else len(self._foreign)
        self._looks = 1 if region.crowded else LOOKS

    @property
    def unfinished(self) -> bool:
        """Whether this rank has anything left to do."""
        return self._taken < len(self._foreign) or self._staged < len(self._foreign) or self._reduced < len(self._own)

    def advance(self) -> bool:
        """Do what can be done, some PASSES at most; False: a peer must do something first."""
        return self._region.quiet.run(self._advance)

    def _advance(self) -> bool:
        for _ in range(PASSES):
            if not self._step_soon():
                return False
            self._region.nudge(self._region.peers)
            if not self.unfinished:
                break
        return True

    def _step_soon(self) -> bool:
        return any(self._step() for _ in range(self._looks))

    def _step(self) -> bool:
        """One chunk of each kind, where that is possible; say whether anything moved."""
        moved = False
        if self._staged < len(self._foreign):
            moved = self._stage(self._foreign[self._staged])
        if self._reduced < len(self._own):
            moved |= self._reduce(self._own[self._reduced])
        if self._taken < len(self._foreign):
            moved |= self._take(self._foreign[self._taken])
        return moved

    def _stage(self, chunk: Chunk) -> bool:
        piece, start, stop, owner, turn = chunk
        if not self._slot_is_free(owner, turn):
            return False
        region, arithmetic = self._region, self._arithmetic
        slot = region.slot(arithmetic, region.rank, owner, turn)
        arithmetic.copy(slot[: stop - start], self._pieces[piece][start:stop])
        region.order()
        region.mine.staged[owner] = turn + 1
        if self._results is not Results.TO_ALL:
            region.mine.taken[owner] = turn + 1
        self._staged += 1
        return True

    def _slot_is_free(self, owner: int, turn: int) -> bool:
        """The chunk before the last in this slot must have been used by everybody who looks at it."""
        region = self._region
        counters = region.counters
        if counters[owner].received[region.rank] < region.mine.passed[owner]:
            return False
        needed = turn - SLOTS + 1
        if needed <= 0:
            return True
        if counters[owner].reduced < needed:
            return False
        if region.rank != first_peer(owner):
            return True
        return all(each.taken[owner] >= needed for peer, each in enumerate(counters) if peer != owner)

    def _reduce(self, chunk: Chunk) -> bool:
        region = self._region
        piece, start, stop, owner, turn = chunk
        for peer in region.peers:
            if region.counters[peer].staged[owner] <= turn:
                return False
        region.order()
        if self._compare is not None:
            self._compare()
            self._compare = None
        arithmetic = self._arithmetic
        length = stop - start
        own = self._pieces[piece][start:stop]
        copies = [region.slot(arithmetic, peer, owner, turn)[:length] for peer in region.peers]
        # In the order of the ranks whoever adds (the first two may be swapped): then a sum does not depend on how the
        # work was cut and dealt, and a run that is resumed or bucketed otherwise gives the same bits.
        first, others = own, copies
        if region.rank > 1:
            first, others = copies[0], [*copies[1 : region.rank], own, *copies[region.rank :]]
        if self._results is Results.TO_ALL:
            arithmetic.merge(first, others, own, copies[0])
        elif self._results is Results.TO_OWNER:
            arithmetic.combine(first, others, [] if first is own else [own])
        else:
            arithmetic.accumulate(first, others)
            if first is not own:
                arithmetic.copy(own, first)
        region.order()
        region.mine.reduced = turn + 1
        self._reduced += 1
        return True

    def _take(self, chunk: Chunk) -> bool:
        region = self._region
        piece, start, stop, owner, turn = chunk
        if region.counters[owner].reduced <= turn:
            return False
        region.order()
        slot = region.slot(self._arithmetic, first_peer(owner), owner, turn)
        self._arithmetic.deliver(self._pieces[piece][start:stop], slot[: stop - start])
        region.order()
        region.mine.taken[owner] = turn + 1
        self._taken += 1
        return True
