"""A reduction that is prepared once for tensors of given lengths, and run step after step.

    run    post what this rank does     one of three ways                              the number of active ranks
                                        staged: nobody waits before the first chunk
                                        CMA: arrive, reduce in the peers' memory, depart
                                        in place: the same, in shared allocations

Which way is decided when the work is prepared: it is staged, unless the tensors are short on average and the ranks
reach each other's memory. Staging took 0.75 to 1.03 of the time of CMA for all but many short tensors, where CMA was
1.4 times faster. Tensors in shared allocations are reduced in place wherever all ranks have them at the same place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.shared_memory.cma import CmaReduction
from hvlike.backends.shared_memory.in_place_shm import AllocationPlace, InPlaceReduction, SharedAllocations, place_word
from hvlike.backends.shared_memory.region import ACTIVE
from hvlike.backends.shared_memory.staging import StagedReduction
from hvlike.backends.shared_memory.work_sync import WorkSync
from hvlike.transport.loop.coroutine import Coroutine

MakeStaged = Callable[[Sequence[int], Arithmetic], StagedReduction]  # What stages tensors of such lengths


class PreparedReduction:
    """Reduces tensors of the same lengths each time. All ranks prepare and run the same, in the same order."""

    def __init__(
        self,
        sync: WorkSync,
        allocations: SharedAllocations,
        arithmetic: Arithmetic,
        lengths: Sequence[int],
        stamp: int,
        make_staged: MakeStaged,
        cma: CmaReduction | None,
    ) -> None:
        """stamp: of this work, the same on all ranks. cma: None for tensors that are staged."""
        self._sync = sync
        self._allocations = allocations
        self._shared = allocations.by_start
        self._arithmetic = arithmetic
        self._lengths = list(lengths)
        self._sizes = [length * arithmetic.itemsize for length in lengths]
        self._stamp = stamp
        self._make_staged = make_staged
        self._cma = cma
        self._staged = None if cma is not None else make_staged(lengths, arithmetic)

    def run(self, addresses: list[int], active: bool = True, tensors: Sequence[torch.Tensor] = ()) -> Coroutine[int]:
        """Reduce the tensors that begin at these addresses; returns how many ranks were active.

        addresses: in host memory, of dense tensors of the dtype of the reduction; the caller holds them.
        active: whether this rank has gradients of its own. tensors: these tensors; they live on if a rank gives up
        while a peer may write there.
        Raises: MismatchError where a peer is at other work; HorovodInternalError where a peer has given up.
        """
        sync, word, places = self._sync, 0, None
        region = sync.region
        if self._shared:
            places = self._allocations.places(addresses, self._sizes)
            word = place_word(places)
        if self._cma is not None:
            self._cma.post(addresses)
        number = sync.begin(self._stamp, word, active=active)
        if places or self._staged is None:
            work = self._together(addresses, number, places or {}, tensors)
        else:
            work = self._staged.run(addresses)
        step = region.quiet.run
        try:
            while True:
                yield step(next, work)
        except StopIteration:
            # All have posted: this rank has what they contributed.
            counted, word = 0, ACTIVE + number % 2
            for counters in region.counters:
                counted += counters.words[word]
            return counted
        except GeneratorExit:
            work.close()
            raise
        except BaseException as error:
            # Also one that comes from outside ends the work: it tells the peers.
            work.throw(error)
            raise

    def _together(
        self,
        addresses: list[int],
        number: int,
        places: dict[int, AllocationPlace],
        tensors: Sequence[torch.Tensor],
    ) -> Coroutine[None]:
        """Reduce where all ranks have to arrive first."""
        sync = self._sync
        with sync.exposed(tensors, number):
            yield from sync.arrive(number)
            if places and sync.region.is_same_place(number):
                yield from self._in_place(addresses, number, places)
            elif self._cma is not None:
                self._cma.begin(number)
                yield from sync.reduce_unstaged(self._cma, number)
            else:
                assert self._staged is not None
                yield from self._staged.run(addresses)

    def _in_place(self, addresses: list[int], number: int, places: dict[int, AllocationPlace]) -> Coroutine[None]:
        """Reduce those in shared allocations where they are, and stage the others."""
        sync, arithmetic = self._sync, self._arithmetic
        copies = [self._allocations.copies(place, self._sizes[each], arithmetic) for each, place in places.items()]
        reduction = InPlaceReduction(sync.region, arithmetic, copies, number % sync.region.ranks)
        reduction.begin(number)
        yield from sync.reduce_unstaged(reduction, number)
        others = [each for each in range(len(addresses)) if each not in places]
        if others:
            staged = self._make_staged([self._lengths[each] for each in others], arithmetic)
            yield from staged.run([addresses[each] for each in others])
