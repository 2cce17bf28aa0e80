"""The shared backend: ranks of one node reduce and exchange through a small region of shared memory.

The tensors stay where they are. They are cut into chunks, dealt to the ranks in turn. Of a chunk
that it does not own a rank stages its copy; the owner reduces all copies with its own part, in its
own memory, and writes the result over the staged copy of its first peer, where all peers take it:

    rank 0   stage B   reduce A   stage D   take B   reduce C  ...
    rank 1   stage A   reduce B   stage C   take A   reduce D  ...      (A, C owned by 0; B, D by 1)

Every element is reduced on exactly one rank, so the results are bitwise the same everywhere.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch

from hvlike.backends.arithmetic.arithmetic import Arithmetic, Piece
from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.backends.arithmetic.views import Bundle
from hvlike.backends.shared_memory.algorithm_choice import AlgorithmChoices, Repeated
from hvlike.backends.shared_memory.cma import CmaMemory
from hvlike.backends.shared_memory.in_place_shm import AllocationPlace, InPlaceReduction, SharedAllocations, place_word
from hvlike.backends.shared_memory.inline_reduction import MOST_STAGED, InlineReduction
from hvlike.backends.shared_memory.region import ActiveRankCount, Region
from hvlike.backends.shared_memory.schedule import SLOTS, SMALLEST_SHARE, Chunk, Turns, cut, fitting, in_rounds
from hvlike.backends.shared_memory.shm_alltoall import ShmAlltoall
from hvlike.backends.shared_memory.staging import PASSES, Reduction, Results
from hvlike.backends.shared_memory.work_sync import WorkSync
from hvlike.transport.loop.coroutine import Coroutine, Wait

_BYTES = Arithmetic(torch.uint8, ReduceOp.SUM)


class SharedBackend:
    """Reductions and gathers among the ranks of one node; every call in the same order on all of them."""

    def __init__(self, region: Region, direct: SharedAllocations, memory: CmaMemory) -> None:
        self._region = region
        self._direct = direct
        self._meeting = WorkSync(region)
        self._reductions = Turns.start(region.ranks)
        self._gathers = Turns.start(region.ranks)
        self._census = ActiveRankCount(region)
        self._fastest = AlgorithmChoices(self._meeting, region, memory, self._reductions)

    def begin_count(self, *, active: bool) -> None:
        """See Backend."""
        self._census.begin(yes=active)

    def end_count(self) -> Coroutine[int]:
        """See Backend."""
        while (total := self._census.count()) is None:
            self._meeting.check_peers()
            yield Wait.NOTIFY
        return total

    def allreduce(self, tensors: Sequence[torch.Tensor], arithmetic: Arithmetic) -> Coroutine[None]:
        """Reduce flat contiguous CPU tensors in place; the same lengths on every rank."""
        yield from self.allreduce_bundles((), tensors, arithmetic)

    def allreduce_pieces(
        self,
        tensors: Sequence[torch.Tensor],
        pieces: Sequence[Piece],
        arithmetic: Arithmetic,
        stamp: int,
        bundles: Sequence[Bundle] = (),
    ) -> Coroutine[None]:
        """The same for tensors whose elements `pieces` are, after bundles.

        stamp: any number that all ranks give this work.
        """
        if not bundles and not any(map(len, pieces)):
            return
        places = self._direct.places(tensors)
        near = self._fastest.takes([tensor.nbytes for tensor in tensors])
        for word, index in enumerate(near):
            self._region.mine.addresses[word] = tensors[index].data_ptr()
        number = self._meeting.announce(stamp, place_word(places))
        with self._meeting.exposed(tensors if near else (), number):
            yield from self._reduce_announced(tensors, pieces, arithmetic, places, number, near, bundles)

    def _reduce_announced(
        self,
        tensors: Sequence[torch.Tensor],
        pieces: Sequence[Piece],
        arithmetic: Arithmetic,
        places: dict[int, AllocationPlace],
        number: int,
        near: Sequence[int],
        bundles: Sequence[Bundle] = (),
    ) -> Coroutine[None]:
        """places: of those that lie in shared allocations; near: those that peers may reach into."""
        if places and (yield from self._reduce_in_place(tensors, arithmetic, places, number)):
            pieces = [piece for index, piece in enumerate(pieces) if index not in places]
            near = []
        staged = [piece for index, piece in enumerate(pieces) if index not in near] if near else pieces
        staged = [*(bundle.piece for bundle in bundles), *staged]
        chunks = self._deal([len(piece) for piece in staged], arithmetic, None, whole=len(bundles))
        yield from self._reduce(staged, arithmetic, chunks, Results.TO_ALL, bundles)
        if near:
            lengths = [len(pieces[index]) for index in near]
            fastest = self._fastest.of(lengths, arithmetic, _stamp_of(lengths, arithmetic))
            use = fastest.next
            if use.meets:
                yield from self._meeting.meet(number)
            yield from fastest.reduce(use, [tensors[index].data_ptr() for index in near], number)

    def at_once(self, arithmetic: Arithmetic, length: int, stamp: int) -> InlineReduction:
        """Reductions of one tensor of this length, which all ranks agree on elsewhere; stamp: of this kind of them."""
        small = length * arithmetic.itemsize <= MOST_STAGED
        staged = self._fastest.staged([length], arithmetic) if small else None
        fastest = self._fastest.agreed([length], arithmetic, stamp)
        return InlineReduction(self._meeting, self._region, self._direct, staged, fastest, arithmetic, length, stamp)

    def repeated(self, lengths: Sequence[int], arithmetic: Arithmetic) -> Repeated | None:
        """See Backend."""
        if not self._fastest.takes_all([length * arithmetic.itemsize for length in lengths]):
            return None
        stamp = _stamp_of(lengths, arithmetic)
        fastest = self._fastest.of(lengths, arithmetic, stamp)
        in_place = partial(self._reduce_some_in_place, arithmetic)
        return Repeated(self._meeting, self._region, self._direct, fastest, stamp, in_place)

    def _reduce_some_in_place(
        self, arithmetic: Arithmetic, tensors: Sequence[torch.Tensor], places: dict[int, AllocationPlace], number: int
    ) -> Coroutine[None]:
        """Reduce an announced work of which these places are the same on all ranks; all have met."""
        flats = [tensor.as_strided((tensor.numel(),), (1,)) for tensor in tensors]
        pieces = [arithmetic.view(flat) for flat in flats]
        yield from self._reduce_announced(flats, pieces, arithmetic, places, number, [])

    @property
    def bundling(self) -> SharedBackend:
        """See Backend."""
        return self

    def bundle_elements(self, total: int, itemsize: int) -> int:
        """See Bundling: so that every rank owns as many bundles as any other, as far as that can be said before."""
        ranks, largest = self._region.ranks, self._region.chunk // itemsize
        bundles = max(1, -(-total // (largest * ranks))) * ranks
        return fitting(-(-total * ranks // bundles), largest, SMALLEST_SHARE // itemsize, ranks)

    def allreduce_bundles(
        self, bundles: Sequence[Bundle], tensors: Sequence[torch.Tensor], arithmetic: Arithmetic
    ) -> Coroutine[None]:
        """See Bundling."""
        pieces = [arithmetic.view(tensor) for tensor in tensors]
        stamp = _stamp_of([*(len(each.piece) for each in bundles), *map(len, pieces)], arithmetic)
        yield from self.allreduce_pieces(tensors, pieces, arithmetic, stamp, bundles)

    def _reduce_in_place(
        self, tensors: Sequence[torch.Tensor], arithmetic: Arithmetic, places: dict[int, AllocationPlace], number: int
    ) -> Coroutine[bool]:
        """Reduce the tensors that lie in shared allocations, if all ranks have them there; returns whether they have.

        A rank whose tensors lie elsewhere does not wait for this decision: it stages, and so do then all.
        number: of the work, which this rank has announced.
        """
        region = self._region
        yield from self._meeting.meet(number)
        if not region.is_same_place(number):
            return False
        copies = [self._direct.copies(place, tensors[index].nbytes, arithmetic) for index, place in places.items()]
        reduction = InPlaceReduction(region, arithmetic, copies, number % region.ranks)
        reduction.begin(number)
        yield from self._meeting.in_place(reduction, number)
        return True

    def reduce_partially(
        self, tensors: Sequence[torch.Tensor], arithmetic: Arithmetic, owner: int | None
    ) -> Coroutine[list[Chunk]]:
        """Leave the partial result of every chunk with its owner; `owner`: one rank for all, None: in turn.

        Returns the chunks, with their owners.
        """
        chunks = self._deal([tensor.numel() for tensor in tensors], arithmetic, owner)
        yield from self._work(tensors, arithmetic, chunks, Results.PARTIAL)
        return chunks

    def reduce_scatter(
        self, tensors: Sequence[torch.Tensor], owners: Sequence[int], arithmetic: Arithmetic, *, partial: bool = False
    ) -> Coroutine[None]:
        """Reduce each tensor on the rank `owners[i]` of the node, in place; the others' are only read.

        partial: leave what `arithmetic.continuation` goes on with.
        """
        region = self._region
        elements = region.chunk // arithmetic.itemsize
        runs = in_rounds(cut([len(tensor) for tensor in tensors], elements), owners)
        chunks = self._reductions.split(runs, elements)
        yield from self._work(tensors, arithmetic, chunks, Results.PARTIAL if partial else Results.TO_OWNER)
        # A rank that owns nothing could run ahead, and its third stamp replace the first before that was looked at.
        last = {chunk.owner: chunk.turn for chunk in chunks if chunk.owner != region.rank}
        yield from self._move(
            lambda: False,
            lambda: any(region.counters[owner].reduced <= turn for owner, turn in last.items()),
        )

    def gather(self, tensors: Sequence[torch.Tensor], owners: Sequence[int]) -> Coroutine[None]:
        """Write each tensor of bytes from the rank `owners[i]` of the node to all others."""
        runs = [
            (piece, 0, len(tensor), owner) for piece, (tensor, owner) in enumerate(zip(tensors, owners, strict=True))
        ]
        yield from self.gather_runs(tensors, runs, _BYTES)

    def alltoall(self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> Coroutine[None]:
        """Send `sends[i]` to rank i of the node and fill `receives[i]` from it; the own part is copied."""
        passing = ShmAlltoall(self._region, self._reductions.counts, sends, receives)
        yield from self._move(passing.step, lambda: passing.unfinished)

    def close(self) -> None:
        """Nothing is held but memory."""

    def gather_runs(
        self, tensors: Sequence[torch.Tensor], runs: Sequence[tuple[int, int, int, int]], arithmetic: Arithmetic
    ) -> Coroutine[None]:
        """Write every run (piece, start, stop, owner) from its owner to all other ranks of the node."""
        region = self._region
        pieces = [arithmetic.view(tensor) for tensor in tensors]
        publishing: deque[Chunk] = deque()
        fetching: dict[int, deque[Chunk]] = {}
        for chunk in self._gathers.split(runs, region.chunk // arithmetic.itemsize):
            (publishing if chunk.owner == region.rank else fetching.setdefault(chunk.owner, deque())).append(chunk)
        yield from self._move(
            lambda: self._publish(pieces, publishing, arithmetic) | self._fetch(pieces, fetching, arithmetic),
            lambda: bool(publishing or fetching),
        )

    def _move(self, step: Callable[[], bool], unfinished: Callable[[], bool]) -> Coroutine[None]:
        """Repeat `step` until nothing is left, waking the peers after every one that moved something."""
        region = self._region
        passes = 0
        while unfinished():
            if step():
                region.notify_if_sleeping(region.peers)
                passes += 1
                if passes % PASSES == 0:
                    yield Wait.AGAIN
            else:
                self._meeting.check_peers()
                yield Wait.NOTIFY

    # -- reduction ------------------------------------------------------------------------------

    def _deal(
        self, lengths: Sequence[int], arithmetic: Arithmetic, owner: int | None, *, whole: int = 0
    ) -> list[Chunk]:
        """Cut pieces into chunks; `owner`: one rank for all, None: in turn; whole: so many at the front are not cut."""
        largest = self._region.chunk // arithmetic.itemsize
        elements = fitting(sum(lengths), largest, SMALLEST_SHARE // arithmetic.itemsize, self._region.ranks)
        runs = [(piece, 0, length) for piece, length in enumerate(lengths[:whole])]
        runs += [(whole + piece, start, stop) for piece, start, stop in cut(lengths[whole:], elements)]
        return self._reductions.deal(runs) if owner is None else self._reductions.give(runs, owner)

    def _work(
        self,
        tensors: Sequence[torch.Tensor],
        arithmetic: Arithmetic,
        chunks: Sequence[Chunk],
        results: Results,
    ) -> Coroutine[None]:
        if not chunks:
            return
        pieces = [arithmetic.view(tensor) for tensor in tensors]
        self._meeting.announce(_stamp_of([len(piece) for piece in pieces], arithmetic), 0)
        yield from self._reduce(pieces, arithmetic, chunks, results)

    def _reduce(
        self,
        pieces: Sequence[Piece],
        arithmetic: Arithmetic,
        chunks: Sequence[Chunk],
        results: Results,
        bundles: Sequence[Bundle] = (),
    ) -> Coroutine[None]:
        if not chunks:
            return
        if all(chunk.owner == self._region.rank for chunk in chunks):
            # Nothing that this rank does next wakes a peer that waits for it to arrive.
            self._region.notify_if_sleeping(self._region.peers)
        reduction = Reduction(self._region, arithmetic, pieces, chunks, results, self._meeting.compare, bundles)
        while reduction.unfinished:
            if reduction.advance():
                yield Wait.AGAIN
            else:
                self._meeting.check_peers()
                yield Wait.NOTIFY

    # -- gather ---------------------------------------------------------------------------------

    def _publish(self, pieces: list[Piece], publishing: deque[Chunk], arithmetic: Arithmetic) -> bool:
        if not publishing:
            return False
        region = self._region
        piece, start, stop, owner, turn = publishing[0]
        if any(region.counters[peer].fetched[owner] < turn - SLOTS + 1 for peer in region.peers):
            return False
        slot = region.slot(arithmetic, owner, owner, turn)
        arithmetic.copy(slot[: stop - start], pieces[piece][start:stop])
        region.order()
        region.mine.published = turn + 1
        publishing.popleft()
        return True

    def _fetch(self, pieces: list[Piece], fetching: dict[int, deque[Chunk]], arithmetic: Arithmetic) -> bool:
        """Copy out one chunk of every owner that has published its next one."""
        region = self._region
        moved = False
        for owner, chunks in list(fetching.items()):
            piece, start, stop, _, turn = chunks[0]
            if region.counters[owner].published <= turn:
                continue
            region.order()
            slot = region.slot(arithmetic, owner, owner, turn)
            arithmetic.copy(pieces[piece][start:stop], slot[: stop - start])
            region.order()
            region.mine.fetched[owner] = turn + 1
            moved = True
            chunks.popleft()
            if not chunks:
                del fetching[owner]
        return moved


def _stamp_of(lengths: Sequence[int], arithmetic: Arithmetic) -> int:
    """A number for the reduction of pieces of these lengths, the same on every rank."""
    factors = arithmetic.factors
    described = (*lengths, arithmetic.op, factors.prescale, factors.postscale, factors.divisor)
    return hash((zlib.crc32(str(arithmetic.dtype).encode()), *described))
