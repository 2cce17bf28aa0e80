"""Tensors of the same lengths, over and over, by the faster of two ways: staged, or in the peers' memory.

Which one it is depends on the machine: on how fast its cores exchange what they have just written, and on how fast its
system copies between processes. The sums are the same to the last bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from hvlike.planes.arithmetic import Arithmetic
from hvlike.planes.chunks import Turns
from hvlike.planes.meeting import Meeting
from hvlike.planes.peer_memory import PeerMemory, PeerReduction
from hvlike.planes.region import SPENT, Region
from hvlike.planes.staged import StagedReduction
from hvlike.planes.trial import Trials
from hvlike.transport.routine import Routine

LEAST_MEAN = 32 << 10
"""Bytes of tensors that are staged each by itself, on average; smaller ones gain from being bundled."""

MOST_KNOWN = 64
"""Kinds of work for which all is prepared; with one more they are prepared anew."""


class Use(NamedTuple):
    """How a work is done."""

    staged: bool
    timed: bool

    @property
    def meets(self) -> bool:
        """Whether all must have met before it is begun."""
        return self.timed or not self.staged


STAGED = Use(staged=True, timed=False)


class Fastest:
    """One kind of work, as this rank sees it."""

    def __init__(
        self,
        meeting: Meeting,
        region: Region,
        trials: Trials,
        number: int,
        staged: Callable[[], StagedReduction],
        in_peers: Callable[[], PeerReduction] | None,
    ) -> None:
        """number: of this kind of work, the same on all ranks. Both are made when they are used first.

        in_peers: None where the ranks do not reach each other's memory.
        """
        self._meeting = meeting
        self._region = region
        self._trials = trials
        self._number = number
        self._make_staged = staged
        self._staged: StagedReduction | None = None
        self._make_in_peers = in_peers
        self._in_peers: PeerReduction | None = None

    @property
    def next(self) -> Use:
        """How the next work is done; the same on all ranks."""
        if self._make_in_peers is None:
            return STAGED
        return Use(*self._trials.of(self._number).next)

    def reduce(self, use: Use, addresses: list[int], number: int) -> Routine[None]:
        """Reduce the tensors that begin there; use: the next one, `number` that of this work."""
        if self._make_in_peers is None:
            yield from self._stage(addresses)
            return
        meeting, trials = self._meeting, self._trials
        trial = trials.of(self._number)
        start = time.perf_counter_ns()
        if use.staged:
            yield from self._stage(addresses)
        else:
            yield from self._reach(self._make_in_peers, number)
        if not use.timed:
            trial.pass_by()
            if not use.staged:
                yield from meeting.part(number)
            return
        self._region.mine.words[SPENT] = time.perf_counter_ns() - start
        yield from meeting.part(number)
        # Nobody times anything again before all have met again.
        trial.record(max(counters.words[SPENT] for counters in self._region.counters))
        trials.keep(self._number, trial)

    def _stage(self, addresses: list[int]) -> Routine[None]:
        if self._staged is None:
            self._staged = self._make_staged()
        return self._staged.run(addresses)

    def _reach(self, make: Callable[[], PeerReduction], number: int) -> Routine[None]:
        if self._in_peers is None:
            self._in_peers = make()
        self._in_peers.begin(number)
        return self._meeting.reach(self._in_peers, number)


class FastestOf:
    """What reduces tensors in a region, by their lengths; prepared when such tensors come first."""

    def __init__(self, meeting: Meeting, region: Region, memory: PeerMemory, turns: Turns) -> None:
        """turns: of the reductions of the region."""
        self._meeting = meeting
        self._region = region
        self._turns = turns
        self._known: dict[object, Fastest] = {}
        self.memory = memory
        self.trials = Trials()

    def takes(self, sizes: Sequence[int]) -> list[int]:
        """Which of several tensors of so many bytes are reduced so: the same on every rank."""
        if self.memory.ranks:
            return self.memory.within_reach(sizes)
        return [index for index, nbytes in enumerate(sizes) if self.memory.is_much(nbytes)]

    def takes_all(self, sizes: Sequence[int]) -> bool:
        """Whether all of them are best reduced so together, none of them empty."""
        if self.memory.ranks:
            return len(self.memory.within_reach(sizes)) == len(sizes)
        return self.memory.is_much(sum(sizes)) and sum(sizes) >= LEAST_MEAN * len(sizes)

    def of(self, lengths: Sequence[int], arithmetic: Arithmetic, number: int) -> Fastest:
        """What reduces tensors of these lengths, of which the owners of chunks compare what they are at.

        number: of this kind of work, the same on all ranks.
        """
        key = (number, *lengths, arithmetic.dtype, arithmetic.op, arithmetic.factors)
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            known = self._known[key] = self.agreed(lengths, arithmetic, number, self._meeting.compare)
        return known

    def agreed(
        self, lengths: Sequence[int], arithmetic: Arithmetic, number: int, compare: Callable[[], None] | None = None
    ) -> Fastest:
        """The same anew, where all ranks have agreed on the work before."""
        in_peers = None
        if self.memory.reaches(sum(lengths) * arithmetic.itemsize):
            in_peers = partial(PeerReduction, self._region, self.memory, arithmetic, lengths)
        staged = partial(self.staged, lengths, arithmetic, compare)
        return Fastest(self._meeting, self._region, self.trials, number, staged, in_peers)

    def staged(
        self, lengths: Sequence[int], arithmetic: Arithmetic, compare: Callable[[], None] | None = None
    ) -> StagedReduction:
        """What stages them, in any case."""
        check = self._meeting.check_peers
        return StagedReduction(self._region, self._turns, arithmetic, lengths, check, compare)
