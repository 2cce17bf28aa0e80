"""One reduction among the ranks of a node: what is left to stage, to reduce and to take (picture: shared.py)."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

import torch

from hvlike.planes.arithmetic import Arithmetic, Piece
from hvlike.planes.bundle import Bundle
from hvlike.planes.chunks import SLOTS, Chunk
from hvlike.planes.region import REDUCED, Region, first_peer

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
        bundles: Sequence[Bundle] = (),
    ) -> None:
        """compare: called once, before this rank adds anything: raises if a peer is at other work.

        bundles: what the first pieces are made of, one chunk each.
        """
        rank = region.rank
        self._region = region
        self._arithmetic = arithmetic
        self._deliver = (arithmetic.joining or arithmetic).deliver
        self._slots = region.slots(arithmetic)
        self._pieces = pieces
        self._bundles = bundles
        self._results = results
        self._compare: Callable[[], None] | None = compare
        self._foreign = [chunk for chunk in chunks if chunk[3] != rank]
        self._own = [chunk for chunk in chunks if chunk[3] == rank]
        self._staged = 0
        self._reduced = 0
        self._taken = 0 if results is Results.TO_ALL else len(self._foreign)
        self._looks = 1 if region.crowded else LOOKS
        self.unfinished = bool(chunks)
        """Whether this rank has anything left to do."""

    def advance(self) -> bool:
        """Do what can be done, some PASSES at most; False: a peer must do something first."""
        if not self._bundles:
            return self._region.quiet.run(self._advance)
        # In inference mode any tensor may be written: one that requires a gradient, one that was made in it.
        with torch.inference_mode():
            return self._region.quiet.run(self._advance)

    def _advance(self) -> bool:
        region = self._region
        sleepers = region.sleepers
        for _ in range(PASSES):
            if not any(self._step() for _ in range(self._looks)):
                break
            for bell in sleepers:
                bell.nudge()
            if self._taken == len(self._foreign) == self._staged and self._reduced == len(self._own):
                self.unfinished = False
                break
        else:
            return True
        # A peer that was about to sleep when it was looked at has looked at the counters once more, or is woken now.
        region.nudge(region.peers)
        return not self.unfinished

    # The code of a step is run between chunks that have filled the caches, and so is mostly fetched anew each time:
    # few calls and few objects matter more here than elsewhere.
    def _step(self) -> bool:
        """One chunk of each kind, where that is possible; say whether anything moved."""
        region, slots, pieces = self._region, self._slots, self._pieces
        mine, counters, order, bundles = region.mine, region.counters, region.order, self._bundles
        moved = False
        if self._staged < len(self._foreign):
            piece, start, stop, owner, turn = self._foreign[self._staged]
            if self._slot_is_free(owner, turn):
                if piece < len(bundles):
                    bundles[piece].gather()
                self._arithmetic.copy(slots.staged[owner][turn % SLOTS][: stop - start], pieces[piece][start:stop])
                order()
                mine.staged[owner] = turn + 1
                if self._results is not Results.TO_ALL:
                    mine.taken[owner] = turn + 1
                self._staged += 1
                moved = True
        if self._reduced < len(self._own):
            piece, start, stop, owner, turn = self._own[self._reduced]
            if all(counters[peer].staged[owner] > turn for peer in region.peers):
                order()
                copies = [slot[: stop - start] for slot in slots.copies[turn % SLOTS]]
                if piece < len(bundles):
                    bundles[piece].gather()
                self._reduce(pieces[piece][start:stop], copies)
                order()
                mine.words[REDUCED] = turn + 1
                if piece < len(bundles):
                    bundles[piece].scatter()
                self._reduced += 1
                moved = True
        if self._taken < len(self._foreign):
            piece, start, stop, owner, turn = self._foreign[self._taken]
            if counters[owner].words[REDUCED] > turn:
                order()
                target, result = pieces[piece][start:stop], slots.results[owner][turn % SLOTS][: stop - start]
                self._deliver(target, result)
                order()
                mine.taken[owner] = turn + 1
                if piece < len(bundles):
                    bundles[piece].scatter()
                self._taken += 1
                moved = True
        return moved

    def _slot_is_free(self, owner: int, turn: int) -> bool:
        """The chunk before the last in this slot must have been used by everybody who looks at it."""
        region = self._region
        counters = region.counters
        if counters[owner].received[region.rank] < region.mine.passed[owner]:
            return False
        needed = turn - SLOTS + 1
        if needed <= 0:
            return True
        if counters[owner].words[REDUCED] < needed:
            return False
        if region.rank != first_peer(owner):
            return True
        return all(each.taken[owner] >= needed for peer, each in enumerate(counters) if peer != owner)

    def _reduce(self, own: Piece, copies: list[Piece]) -> None:
        """Reduce the own piece with the peers' copies; the result goes to both the own and the first one."""
        if self._compare is not None:
            self._compare()
            self._compare = None
        rank, arithmetic, results = self._region.rank, self._arithmetic, self._results
        if results is Results.TO_ALL:
            join_in_order(arithmetic, rank, own, copies)
            return
        first, others = in_order(rank, own, copies)
        if results is Results.TO_OWNER:
            arithmetic.combine(first, others, [] if first is own else [own])
        else:
            arithmetic.accumulate(first, others)
            if first is not own:
                arithmetic.copy(own, first)


def in_order(rank: int, own: Piece, copies: list[Piece]) -> tuple[Piece, list[Piece]]:
    """The first piece and the others, in the order of the ranks whoever adds; the first two may be swapped.

    Then a sum does not depend on how the work was cut and dealt, and a run that is resumed or bucketed otherwise gives
    the same bits.
    """
    if rank > 1:
        return copies[0], [*copies[1:rank], own, *copies[rank:]]
    return own, copies


def join_in_order(arithmetic: Arithmetic, rank: int, own: Piece, copies: list[Piece]) -> None:
    """Reduce what this rank owns with the peers' copies; the result is in `own`, and for `deliver` in the first copy.

    The caller silences numpy.
    """
    first, others = in_order(rank, own, copies)
    kernel = arithmetic.joining
    if kernel is not None:
        kernel.join(first, others, copies[0])
        kernel.deliver(own, copies[0])
    else:
        arithmetic.combine(first, others, [copies[0]] if first is own else [own])
