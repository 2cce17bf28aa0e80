"""How the ranks of a node synchronise on a piece of work: post what comes, arrive, depart.

Staged work needs no more than a comparison of stamps. Where ranks reach into each other's tensors, all must have
arrived before one begins, and none may leave before all have departed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from hvlike.backends.shared_memory.cma import CmaReduction
from hvlike.backends.shared_memory.in_place_shm import InPlaceReduction
from hvlike.backends.shared_memory.region import APART, DEPARTED, LEFT, Region
from hvlike.backends.shared_memory.staging import LOOKS
from hvlike.errors import HorovodInternalError, MismatchError, PeerLeftError
from hvlike.transport.loop.coroutine import Coroutine, Wait

kept: list[Sequence[torch.Tensor]] = []
"""Tensors of reductions that were given up."""


class WorkSync:
    """The pieces of work of one region, in their order, as this rank sees them."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._looks = 1 if region.crowded else LOOKS
        self.number = 0
        """Of the newest work that has begun."""
        self._stamp = 0

    def announce(self, stamp: int, place: int) -> int:
        """Say which work this is and what of it lies in shared allocations; returns its number.

        The owners compare before they add anything.
        """
        self.foretell(stamp, place)
        return self.enter()

    def foretell(self, stamp: int, place: int) -> None:
        """Say so of the next work before it is certain that it comes; what is said last counts."""
        self._stamp = stamp & 0xFFFFFFFFFFFFFFFF
        self._region.mine.arrive(self.number + 1, self._stamp, place)

    def enter(self) -> int:
        """The next work begins; returns its number."""
        self.number += 1
        return self.number

    def meet(self, number: int) -> Coroutine[None]:
        """Wait until all are at the work of this number, which is the same for all."""
        region = self._region
        counters, peers = region.counters, region.peers
        region.notify_if_sleeping(peers)
        while not any(all(counters[peer].arrived >= number for peer in peers) for _ in range(self._looks)):
            self.check_peers()
            yield Wait.NOTIFY
        region.order()
        self.compare()

    # As the steps of a reduction, what follows is run between chunks that have emptied the caches.
    def part(self, number: int) -> Coroutine[None]:
        """Wait until all have done their part of the work of this number."""
        region = self._region
        region.order()
        region.mine.words[DEPARTED] = number
        region.notify_if_sleeping(region.peers)
        for counters in region.others:
            words = counters.words
            while words[DEPARTED] < number:
                for _ in range(self._looks):
                    if words[DEPARTED] >= number:
                        break
                else:
                    self.check_peers()
                    yield Wait.NOTIFY
        region.order()

    def in_place(self, reduction: InPlaceReduction, number: int) -> Coroutine[None]:
        """Do this rank's chunks of tensors in shared allocations, and part; all have met."""
        while reduction.unfinished:
            # Where nothing is to be taken, a peer is between two statements.
            yield Wait.AGAIN if self._region.quiet.run(reduction.advance) else Wait.NOTIFY
        yield from self.part(number)

    def reach(self, reduction: CmaReduction, number: int) -> Coroutine[None]:
        """Do this rank's chunks of tensors in the ranks' own memory; all have met, and must part before they leave."""
        region = self._region
        while reduction.unfinished:
            while any(each.abandoned >= number for each in region.others):
                # Who has given it up tells why in other ways.
                yield Wait.NOTIFY
            try:
                moved = region.quiet.run(reduction.advance)
            except ProcessLookupError as error:
                raise PeerLeftError(f"A rank of this node has vanished without a word ({error}).") from None
            except OSError as error:
                raise HorovodInternalError(
                    f"local rank {region.rank} cannot reach the memory of another rank of this node any more: "
                    f"{error}. HVLIKE_PEER_MEMORY=0 does without."
                ) from None
            yield Wait.AGAIN if moved else Wait.NOTIFY

    @contextlib.contextmanager
    def exposed(self, tensors: Sequence[torch.Tensor], number: int) -> Iterator[None]:
        """Peers may read and write these tensors; if this rank gives the work up, the memory must stay."""
        try:
            yield
        except BaseException:
            self.abandon(tensors, number)
            raise

    def abandon(self, tensors: Sequence[torch.Tensor], number: int) -> None:
        """Give the work of this number up, into whose tensors peers may reach for ever."""
        if tensors:
            self._region.mine.abandoned = number
            kept.append(tensors)

    def compare(self) -> None:
        """Give the region up if a peer has entered other work: its chunks would be foreign memory."""
        region = self._region
        others = [peer for peer in region.peers if region.counters[peer].stamp(self.number) != self._stamp]
        if others:
            region.mine.failed = APART
            region.notify_if_sleeping(region.peers)
            raise MismatchError(
                f"the ranks with local ranks {others} reduce other tensors at this point than local rank "
                f"{region.rank}: a planned reduction must have the same tensors, dtypes and "
                "factors in the same order on every rank"
            )

    def check_peers(self) -> None:
        """Give the region up if a peer has.

        Raises: MismatchError when ranks are at different work, HorovodInternalError when one has left it.
        """
        region = self._region
        for peer in region.peers:
            why = region.counters[peer].failed
            if not why:
                continue
            region.mine.failed = why
            if why == LEFT:
                raise HorovodInternalError(
                    f"local rank {peer} has left a reduction in the middle: it was interrupted, or an error ended it "
                    "there or on a rank that it waited for"
                )
            raise MismatchError(
                f"local rank {peer} has found that the ranks of this node reduce different tensors at this point"
            )
