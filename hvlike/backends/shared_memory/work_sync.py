"""How the ranks of a node synchronise on a piece of work: post what comes, arrive, depart.

    post      write down what this rank does next
    arrive    wait until all ranks are at the same work
    depart    wait until all ranks have done their part of it

Staged work only compares what was posted. Where ranks reach into each other's tensors, all must have arrived before
one begins, and none may leave before all have departed. Then any rank could reduce any chunk: each takes its own from
the front, then those of the next rank from the back.

    chunks of rank 1     0 1 2 3 4 5 6 7
    rank 1 itself        0 1 2 3 4             front = 5
    rank 0, which helps            5 6 7       back = 3

Cores are not equally fast from moment to moment, and the slowest would be waited for. Both claim before they begin:
each writes its word, fences, and then reads the other's (Dekker 1965), so that one of them sees a chunk that both have
claimed. A helper that sees one gives its claim back; the owner takes it once the helper has settled. The words carry
the number of the work, so what they hold of an earlier one counts as nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Generic, NoReturn, Protocol, TypeVar

import torch

from hvlike.backends.shared_memory.region import (
    ABANDONED,
    ACTIVE,
    APART,
    ARRIVED,
    BACK,
    DEPARTED,
    FAILED,
    FRONT,
    LEFT,
    LOST,
    PLACES,
    SETTLED,
    STAMPS,
    Region,
)
from hvlike.errors import HorovodInternalError, MismatchError, PeerLeftError
from hvlike.transport.loop.coroutine import Coroutine, Wait
from hvlike.transport.memory.never_freed import ABANDONED_REDUCTION, keep_forever

T = TypeVar("T")


class Unstaged(Protocol):
    """Reduces chunks in the memory of all ranks."""

    @property
    def unfinished(self) -> bool:
        """Whether chunks may be left for this rank."""

    def advance(self) -> bool:
        """Reduce the next few chunks, if any can be taken now; returns whether it has. Raises: OSError."""


class WorkSync:
    """The pieces of work of one region, in their order, as this rank sees them."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self.number = 0

    def post(self, stamp: int, place: int, *, active: int = 1) -> int:
        """Say what the next work is, before it is certain that it comes; the newest post counts. Returns its number.
        stamp: of the work, on all ranks; place: which of its tensors lie where in shared allocations.
        """
        words, number = self.region.mine.words, self.number + 1
        parity = number % 2
        words[STAMPS + parity] = stamp & 0xFFFFFFFFFFFFFFFF
        words[PLACES + parity] = place
        words[ACTIVE + parity] = active
        # Who sees that this rank has arrived reads the others then.
        self.region.order()
        words[ARRIVED] = number
        return number

    def begin(self, stamp: int, place: int, *, active: int = 1) -> int:
        """The same, and the work begins."""
        self.number = self.post(stamp, place, active=active)
        return self.number

    def arrive(self, number: int) -> Coroutine[None]:
        """Wait until all ranks are at the work of this number. Raises: MismatchError where a peer is at other work."""
        region = self.region
        counters, peers = region.counters, region.peers
        region.notify_if_sleeping()
        checks = region.spin.counter_checks
        while not any(all(counters[peer].words[ARRIVED] >= number for peer in peers) for _ in range(checks)):
            self.check_peers()
            yield Wait.NOTIFY
        region.order()
        self.compare()

    # As the steps of a reduction, what follows is run between chunks that have emptied the caches.
    def depart(self, number: int, readers: Sequence[int] | None = None) -> Coroutine[None]:
        """Wait until all ranks have done their part; readers: only those, which reach into this rank's tensors."""
        region = self.region
        region.order()
        region.mine.words[DEPARTED] = number
        region.notify_if_sleeping()
        checks = region.spin.counter_checks
        for peer in region.peers if readers is None else readers:
            words = region.counters[peer].words
            while words[DEPARTED] < number:
                for _ in range(checks):
                    if words[DEPARTED] >= number:
                        break
                else:
                    self.check_peers()
                    yield Wait.NOTIFY
        region.order()

    def count_active(self, number: int) -> int:
        """The sum of what the ranks have posted of being active in this work; all have posted."""
        return sum(counters.words[ACTIVE + number % 2] for counters in self.region.counters)

    def reduce_unstaged(self, reduction: Unstaged, number: int) -> Coroutine[None]:
        """Do this rank's chunks of a work at which all have arrived, and depart. The caller silences numpy."""
        yield from self.finish(reduction, number)
        yield from self.depart(number)

    def finish(self, reduction: Unstaged, number: int) -> Coroutine[None]:
        """The same without the departure."""
        region = self.region
        while reduction.unfinished:
            while any(each.words[ABANDONED] >= number for each in region.others):
                # The rank that has given the work up reports the reason here or elsewhere.
                self.check_peers()
                yield Wait.NOTIFY
            try:
                moved = reduction.advance()
            except ProcessLookupError as error:
                raise PeerLeftError(f"The process of another rank of this node has ended ({error}).") from None
            except OSError as error:
                raise HorovodInternalError(
                    f"local rank {region.rank} can no longer access the memory of another rank of this node: "
                    f"{error}. Set HVLIKE_PEER_MEMORY=0 to do without such access."
                ) from None
            # Where nothing can be taken, a peer is between two statements.
            yield Wait.AGAIN if moved else Wait.NOTIFY

    def for_all(self, coroutine: Coroutine[T]) -> Coroutine[T]:
        """Do what the peers wait for; where it fails, this rank gives the region up: they would wait for ever."""
        try:
            return (yield from coroutine)
        except GeneratorExit:
            # The loop ends a job that cannot be completed: messages tell the other ranks why.
            raise
        except BaseException as error:
            self.region.give_up(error)
            self.region.notify_if_sleeping()
            raise

    @contextlib.contextmanager
    def exposed(self, tensors: Sequence[torch.Tensor], number: int) -> Iterator[None]:
        """Peers may read and write these tensors meanwhile; if this rank gives the work up, the memory must stay."""
        try:
            yield
        except BaseException:
            self.abandon(tensors, number)
            raise

    def abandon(self, tensors: Sequence[torch.Tensor], number: int) -> None:
        """Give the work of this number up; peers may reach into its tensors at any time from now on."""
        if tensors:
            self.region.mine.words[ABANDONED] = number
            keep_forever(ABANDONED_REDUCTION, *tensors)

    def compare(self, arrived: Sequence[int] | None = None) -> None:
        """Raises: MismatchError, and gives the region up, if a peer has begun other work: its chunks would be foreign
        memory. arrived: the peers that have begun; None: all have.
        """
        region, word = self.region, STAMPS + self.number % 2
        stamp = region.mine.words[word]
        peers = region.peers if arrived is None else arrived
        others = [peer for peer in peers if region.counters[peer].words[word] != stamp]
        if others:
            self.set_apart(
                others, "calls, tensors, dtypes and factors must be the same, in the same order, on every rank"
            )

    def set_apart(self, others: Sequence[int], why: str) -> NoReturn:
        """Give the region up, as these ranks are at other work. Raises: MismatchError."""
        region = self.region
        region.mine.words[FAILED] = APART
        region.notify_if_sleeping()
        raise MismatchError(
            f"the ranks with local ranks {list(others)} run another operation at this point than local rank "
            f"{region.rank}: {why}"
        )

    def check_peers(self) -> None:
        """Give the region up if a peer has. Raises: MismatchError: different work; HorovodInternalError: one left."""
        region = self.region
        for peer in region.peers:
            why = region.counters[peer].words[FAILED]
            if not why:
                continue
            region.mine.words[FAILED] = why
            if why == LOST:
                raise PeerLeftError(
                    f"local rank {peer} has left a collective before its end: the process of another rank is lost"
                )
            if why == LEFT:
                raise HorovodInternalError(
                    f"local rank {peer} has left a collective before its end: it was interrupted, or an error occurred "
                    "there or on a rank that it waited for"
                )
            raise MismatchError(
                f"local rank {peer} has found that the ranks of this node run different operations at this point"
            )
        # Each may wait for what the other, at other work, never does.
        arrived = [peer for peer in region.peers if region.counters[peer].words[ARRIVED] >= self.number]
        region.order()
        self.compare(arrived)


Work = TypeVar("Work")

LEAST_SHARED = 8  # Chunks of a rank from which on another one helps; with fewer there is less to gain than it costs
_PART = 4

_SHIFT = 24


class WorkStealing(Generic[Work]):
    """The claims of one rank on one list of chunks, dealt to the ranks in turn."""

    def __init__(self, region: Region, runs: Sequence[Work], first_owner: int) -> None:
        rank, ranks = region.rank, region.ranks
        self._fence = region.fence
        self._mine = runs[(rank - first_owner) % ranks :: ranks]
        self._others = runs[(rank + 1 - first_owner) % ranks :: ranks]
        self._words = region.mine.words
        self._helper = region.counters[(rank - 1) % ranks].words
        self._helped = region.counters[(rank + 1) % ranks].words
        self._tag = 0
        self._front = self._back = self._end = 0
        self._helps = False

    def begin(self, number: int) -> None:
        """Begin the work of this number; the same on all ranks, higher each time."""
        self._tag = number << _SHIFT
        self._front = self._back = 0
        self._end = len(self._mine)
        self._helps = len(self._others) >= LEAST_SHARED

    @property
    def unfinished(self) -> bool:
        """Whether there may be something to take."""
        return self._front < self._end or self._helps

    def take(self, most: int) -> Sequence[Work]:
        """The next runs, at most so many; none where the helper has not settled yet, or nothing is left."""
        if self._front < self._end:
            return self._take_own(most)
        return self._help(most) if self._helps else ()

    def _take_own(self, most: int) -> Sequence[Work]:
        first, mine = self._front, self._mine
        if len(mine) < LEAST_SHARED:
            last = min(first + most, self._end)
        else:
            last = first + min(most, max(1, (self._end - first) // _PART))
            self._words[FRONT] = self._tag + last
            self._fence()
            back = self._helper[BACK]
            left = len(mine) - max(0, back - self._tag)
            if last > left:
                if self._helper[SETTLED] != back:
                    return ()
                last = self._end = left
        self._front = last
        return mine[first:last]

    def _help(self, most: int) -> Sequence[Work]:
        words, others = self._words, self._others
        stop = len(others) - self._back
        while (left := stop - self._owned()) > 0:
            start = stop - min(most, max(1, left // _PART))
            claim = self._tag + len(others) - start
            words[BACK] = claim
            self._fence()
            if start >= self._owned():
                words[SETTLED] = claim
                self._back = len(others) - start
                return others[start:stop]
            words[BACK] = self._tag + self._back
        self._helps = False
        return ()

    def _owned(self) -> int:
        """How many runs the owner that is helped has claimed."""
        return max(0, self._helped[FRONT] - self._tag)
