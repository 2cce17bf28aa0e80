"""Reductions through the staging slots of a region (picture: shared_backend.py).

Reduction takes any pieces. StagedReduction takes tensors of the same lengths over and over: what the lengths decide
(chunks, and the slots they go through) is computed once, what the addresses decide only where they have changed, and
all steps run in one frame.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from hvlike.backends.arithmetic.arithmetic import Arithmetic, Piece
from hvlike.backends.arithmetic.views import AddressView, Bundle
from hvlike.backends.shared_memory.region import LEFT, REDUCED, Region, first_peer
from hvlike.backends.shared_memory.schedule import SLOTS, SMALLEST_SHARE, Chunk, Turns, cut, fitting
from hvlike.transport.loop.coroutine import Coroutine, Wait

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
                bell.notify_if_sleeping()
            if self._taken == len(self._foreign) == self._staged and self._reduced == len(self._own):
                self.unfinished = False
                break
        else:
            return True
        # A peer that was about to sleep when it was looked at has looked at the counters once more, or is woken now.
        region.notify_if_sleeping(region.peers)
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


_CHUNK_BYTES = 128 << 10
"""Half a slot: with more chunks the ranks wait less for the first one."""

_Run = tuple[int, int, int]
"""Elements of a tensor: its index, start, stop."""


class _Foreign(NamedTuple):
    """Where a chunk that another rank owns is staged."""

    owner: int
    place: int
    """Among the chunks of its owner."""
    slots: list[Any]
    """Where it is staged, by turn modulo SLOTS."""
    results: list[Piece]
    """Where the result is taken from."""


class StagedReduction:
    """The chunks of tensors of these lengths."""

    def __init__(
        self,
        region: Region,
        turns: Turns,
        arithmetic: Arithmetic,
        lengths: Sequence[int],
        check: Callable[[], None],
        compare: Callable[[], None] | None = None,
    ) -> None:
        """lengths: in elements. turns: of the reductions of the region. check: raises when a peer has given it up.

        compare: called before this rank adds anything: raises if a peer is at other work.
        """
        self._region = region
        self._turns = turns
        self._arithmetic = arithmetic
        self._check = check
        self._compare = compare
        self._looks = 1 if region.crowded else LOOKS
        self._deliver: Callable[[Any, Any], None] = (arithmetic.joining or arithmetic).deliver
        self._memory = AddressView(arithmetic)
        self._counts = [0] * region.ranks
        self._own_runs: list[_Run] = []
        self._copies: list[list[list[Piece]]] = []
        """Of each chunk that this rank reduces what the peers have staged, by turn modulo SLOTS."""
        self._foreign_runs: list[_Run] = []
        self._foreign: list[_Foreign] = []
        self._deal(lengths)
        self._addresses: list[int] = []
        self._own_elements: list[Piece] = []
        self._foreign_elements: list[Piece] = []
        self._readers = [
            [counters for each, counters in enumerate(region.counters) if each != owner]
            if first_peer(owner) == region.rank != owner
            else []
            for owner in range(region.ranks)
        ]
        """For each owner: who takes its results, where they are in this rank's slots."""

    def _deal(self, lengths: Sequence[int]) -> None:
        region, itemsize = self._region, self._arithmetic.itemsize
        largest = min(_CHUNK_BYTES, region.chunk) // itemsize
        slots = region.slots(self._arithmetic)
        elements = fitting(sum(lengths), largest, SMALLEST_SHARE // itemsize, region.ranks)
        known: dict[tuple[int, int], Any] = {}
        for number, run in enumerate(cut(lengths, elements)):
            owner, size = number % region.ranks, run[2] - run[1]
            key = (owner, size)
            if owner == region.rank:
                if key not in known:
                    known[key] = [[slot[:size] for slot in staged] for staged in slots.copies]
                self._own_runs.append(run)
                self._copies.append(known[key])
            else:
                if key not in known:
                    known[key] = [[slot[:size] for slot in each[owner]] for each in (slots.staged, slots.results)]
                self._foreign_runs.append(run)
                self._foreign.append(_Foreign(owner, self._counts[owner], *known[key]))
            self._counts[owner] += 1

    def _find(self, addresses: Sequence[int]) -> None:
        """Where the chunks are in this rank's memory."""
        self._addresses = []
        self._own_elements = self._memory.runs(addresses, self._own_runs)
        self._foreign_elements = self._memory.runs(addresses, self._foreign_runs)
        self._addresses = list(addresses)

    def _until_received(self) -> Coroutine[None]:
        """Wait until the peers have what an alltoall has put into this rank's slots."""
        region = self._region
        while any(region.counters[peer].received[region.rank] < region.mine.passed[peer] for peer in region.peers):
            self._check()
            yield Wait.NOTIFY

    # All in one frame: where the caches are cold a call costs more than most statements.
    def run(self, addresses: list[int]) -> Coroutine[None]:
        """Reduce the tensors that begin there, contiguous in host memory and held by the caller; all ranks do.

        Raises: MismatchError, HorovodInternalError when a peer has given the region up, and what `compare` raises.
        """
        region, foreign, readers = self._region, self._foreign, self._readers
        mine, counters, others, order, rank = region.mine, region.counters, region.others, region.order, region.rank
        arithmetic, deliver, quietly = self._arithmetic, self._deliver, region.quiet.run
        compare = self._compare
        bases = self._turns.advance(self._counts)
        staged = reduced = taken = looks = moves = 0
        try:
            if addresses != self._addresses:
                self._find(addresses)
            own_elements, foreign_elements, copies = self._own_elements, self._foreign_elements, self._copies
            if any(mine.passed):
                yield from self._until_received()
            while taken < len(foreign) or reduced < len(copies):
                looks += 1
                if staged < len(foreign):
                    owner, place, slots, _ = foreign[staged]
                    turn = bases[owner] + place
                    needed = turn - SLOTS + 1
                    free = needed <= 0 or counters[owner].words[REDUCED] >= needed
                    for reader in readers[owner]:
                        free = free and (needed <= 0 or reader.taken[owner] >= needed)
                    if free:
                        slots[turn % SLOTS][...] = foreign_elements[staged]
                        order()
                        mine.staged[owner] = turn + 1
                        staged += 1
                        looks = 0
                if reduced < len(copies):
                    turn, there = bases[rank] + reduced, True
                    for other in others:
                        there = there and other.staged[rank] > turn
                    if there:
                        order()
                        if compare is not None:
                            compare()
                            compare = None
                        quietly(join_in_order, arithmetic, rank, own_elements[reduced], copies[reduced][turn % SLOTS])
                        order()
                        mine.words[REDUCED] = turn + 1
                        reduced += 1
                        looks = 0
                if taken < staged:
                    owner, place, _, results = foreign[taken]
                    turn = bases[owner] + place
                    if counters[owner].words[REDUCED] > turn:
                        order()
                        quietly(deliver, foreign_elements[taken], results[turn % SLOTS])
                        order()
                        mine.taken[owner] = turn + 1
                        taken += 1
                        looks = 0
                if not looks:
                    for bell in region.sleepers:
                        bell.notify_if_sleeping()
                    moves += 1
                    if moves % PASSES == 0:
                        yield Wait.AGAIN
                elif looks % self._looks == 0:
                    # A peer that was about to sleep when it was looked at is woken now, or has looked once more.
                    region.notify_if_sleeping(region.peers)
                    self._check()
                    yield Wait.NOTIFY
        except BaseException:
            # The peers would wait for these chunks for ever.
            mine.failed = mine.failed or LEFT
            raise
        finally:
            region.notify_if_sleeping(region.peers)
