"""Which of two algorithms reduces tensors of given lengths: staged, or in the peers' memory.

Which is faster depends on the machine: on how fast its cores exchange what they have just written, and on how fast its
kernel copies between processes. The sums are the same to the last bit.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.shared_memory.cma import CmaMemory, CmaReduction
from hvlike.backends.shared_memory.in_place_shm import AllocationPlace, SharedAllocations, place_word
from hvlike.backends.shared_memory.region import SPENT, Region
from hvlike.backends.shared_memory.schedule import Turns
from hvlike.backends.shared_memory.staging import StagedReduction
from hvlike.backends.shared_memory.work_sync import WorkSync
from hvlike.transport.loop.coroutine import Coroutine

ROUNDS = 4
"""How often each way is tried; the first time counts for nothing, as memory is touched then that never was."""

PERIOD = 1000
"""After so many uses all begins anew: cores of a virtual machine may have moved farther apart."""

MOST_KNOWN = 1024
"""Kinds of work that are remembered; with one more all are tried anew."""


class Trial:
    """Of one kind of work. The ways are False and True."""

    def __init__(self) -> None:
        self._uses = 0
        self._times: tuple[list[int], list[int]] = ([], [])
        self._chosen = False

    @property
    def next(self) -> tuple[bool, bool]:
        """The way of the next use, and whether it is to be timed and recorded."""
        if self._uses < 2 * ROUNDS:
            return self._uses % 2 == 1, True
        return self._chosen, False

    def record(self, nanoseconds: int) -> None:
        """What the use that was to be timed has taken on the slowest rank."""
        self._times[self._uses % 2].append(nanoseconds)
        self._uses += 1
        if self._uses == 2 * ROUNDS:
            first, second = (statistics.median(times[1:]) for times in self._times)
            self._chosen = second < first

    def pass_by(self) -> None:
        """There was a use that was not timed."""
        self._uses += 1
        if self._uses == PERIOD:
            self._uses = 0
            self._times = ([], [])


class Trials:
    """The trials of all kinds of work of a region, by numbers that the ranks agree on."""

    def __init__(self) -> None:
        self._known: dict[int, Trial] = {}

    def of(self, number: int) -> Trial:
        """The trial of a kind of work, which begins if it is not known."""
        return self._known.get(number) or Trial()

    def keep(self, number: int, trial: Trial) -> None:
        """Remember it; called by all ranks after the same work, so that they forget at the same time, too."""
        if number not in self._known and len(self._known) >= MOST_KNOWN:
            self._known.clear()
        self._known[number] = trial


LEAST_MEAN = 32 << 10
"""Bytes of tensors that are staged each by itself, on average; smaller ones gain from being bundled."""

MOST_PREPARED = 64
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


class AlgorithmChoice:
    """One kind of work, as this rank sees it."""

    def __init__(
        self,
        meeting: WorkSync,
        region: Region,
        trials: Trials,
        number: int,
        staged: Callable[[], StagedReduction],
        in_peers: Callable[[], CmaReduction] | None,
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
        self._in_peers: CmaReduction | None = None

    @property
    def next(self) -> Use:
        """How the next work is done; the same on all ranks."""
        if self._make_in_peers is None:
            return STAGED
        return Use(*self._trials.of(self._number).next)

    def reduce(self, use: Use, addresses: list[int], number: int) -> Coroutine[None]:
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

    def _stage(self, addresses: list[int]) -> Coroutine[None]:
        if self._staged is None:
            self._staged = self._make_staged()
        return self._staged.run(addresses)

    def _reach(self, make: Callable[[], CmaReduction], number: int) -> Coroutine[None]:
        if self._in_peers is None:
            self._in_peers = make()
        self._in_peers.begin(number)
        return self._meeting.reach(self._in_peers, number)


class AlgorithmChoices:
    """What reduces tensors in a region, by their lengths; prepared when such tensors come first."""

    def __init__(self, meeting: WorkSync, region: Region, memory: CmaMemory, turns: Turns) -> None:
        """turns: of the reductions of the region."""
        self._meeting = meeting
        self._region = region
        self._turns = turns
        self._known: dict[object, AlgorithmChoice] = {}
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

    def of(self, lengths: Sequence[int], arithmetic: Arithmetic, number: int) -> AlgorithmChoice:
        """What reduces tensors of these lengths, of which the owners of chunks compare what they are at.

        number: of this kind of work, the same on all ranks.
        """
        key = (number, *lengths, arithmetic.dtype, arithmetic.op, arithmetic.factors)
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= MOST_PREPARED:
                self._known.clear()
            known = self._known[key] = self.agreed(lengths, arithmetic, number, self._meeting.compare)
        return known

    def agreed(
        self, lengths: Sequence[int], arithmetic: Arithmetic, number: int, compare: Callable[[], None] | None = None
    ) -> AlgorithmChoice:
        """The same anew, where all ranks have agreed on the work before."""
        in_peers = None
        if self.memory.reaches(sum(lengths) * arithmetic.itemsize):
            in_peers = partial(CmaReduction, self._region, self.memory, arithmetic, lengths)
        staged = partial(self.staged, lengths, arithmetic, compare)
        return AlgorithmChoice(self._meeting, self._region, self.trials, number, staged, in_peers)

    def staged(
        self, lengths: Sequence[int], arithmetic: Arithmetic, compare: Callable[[], None] | None = None
    ) -> StagedReduction:
        """What stages them, in any case."""
        check = self._meeting.check_peers
        return StagedReduction(self._region, self._turns, arithmetic, lengths, check, compare)


class Repeated:
    """Tensors of the same lengths each time, in the ranks' own memory; see Repeating."""

    def __init__(
        self,
        meeting: WorkSync,
        region: Region,
        direct: SharedAllocations,
        fastest: AlgorithmChoice,
        stamp: int,
        in_place: Callable[[Sequence[torch.Tensor], dict[int, AllocationPlace], int], Coroutine[None]],
    ) -> None:
        """stamp: of this work, the same on all ranks; in_place: reduces what lies in shared allocations, and the rest.

        It is called after the work of that number has been announced, and all ranks have the same places.
        """
        self._meeting = meeting
        self._region = region
        self._addresses = np.asarray(region.mine.addresses)
        self._direct = direct
        self._fastest = fastest
        self._stamp = stamp
        self._in_place = in_place

    def allreduce(self, tensors: Sequence[torch.Tensor], addresses: list[int]) -> Coroutine[None]:
        """See Repeating."""
        meeting, fastest = self._meeting, self._fastest
        places, use = self._direct.places(tensors), fastest.next
        if not use.staged:
            self._addresses[: len(addresses)] = addresses
        number = meeting.announce(self._stamp, place_word(places))
        try:
            # Who has nothing in shared allocations does not ask whether others have.
            if places or use.meets:
                yield from meeting.meet(number)
            if places and self._region.is_same_place(number):
                yield from self._in_place(tensors, places, number)
            else:
                yield from fastest.reduce(use, addresses, number)
        except BaseException:
            meeting.abandon(tensors, number)
            raise
