"""A reduction through the staging slots (picture: shared.py) of tensors of the same lengths, over and over.

What Reduction does for any pieces, for what is plain: what the lengths decide is made once (chunks, and the slots they
go through), what the addresses decide only where they have changed, and all steps are in one frame. Where caches are
cold, as after a backward, that counts for as much as the copies do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hvlike.planes.arithmetic import Arithmetic, Piece
from hvlike.planes.chunks import SLOTS, SMALLEST_SHARE, Turns, cut, fitting
from hvlike.planes.own_memory import OwnMemory
from hvlike.planes.reduction import LOOKS, PASSES, join_in_order
from hvlike.planes.region import LEFT, REDUCED, Region, first_peer
from hvlike.transport.routine import Routine, Wait

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
        self._memory = OwnMemory(arithmetic)
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

    def _until_received(self) -> Routine[None]:
        """Wait until the peers have what an alltoall has put into this rank's slots."""
        region = self._region
        while any(region.counters[peer].received[region.rank] < region.mine.passed[peer] for peer in region.peers):
            self._check()
            yield Wait.BELL

    # All in one frame: where the caches are cold a call costs more than most statements.
    def run(self, addresses: list[int]) -> Routine[None]:
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
                        bell.nudge()
                    moves += 1
                    if moves % PASSES == 0:
                        yield Wait.AGAIN
                elif looks % self._looks == 0:
                    # A peer that was about to sleep when it was looked at is woken now, or has looked once more.
                    region.nudge(region.peers)
                    self._check()
                    yield Wait.BELL
        except BaseException:
            # The peers would wait for these chunks for ever.
            mine.failed = mine.failed or LEFT
            raise
        finally:
            region.nudge(region.peers)
