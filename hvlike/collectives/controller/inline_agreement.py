"""Agreement: ranks see that they all ask for the same operation now, without a coordinator.

Every rank numbers its operations; the n-th one of a rank meets the n-th ones of the others. A rank either offers to do
its n-th operation inline or passes it, once and for all:

    offer   to all: kind and name of operation n, perhaps with its data
    pass    this rank's operation n goes, or will go, through the coordinator
    hurry   to all, after a long wait for n: a rank that has not come to n yet passes it now

So all that have offered n decide alike: where all offers are equal they do the operation, else they negotiate it. Names
and numbers are compared, never indices alone: a rank that has counted differently passes, or gets a no.

Ranks of one node have a board in shared memory (backends/shared_memory/board.py): all see what a rank offers or passes.
Ranks of different nodes send messages (backends/network/offers.py). There a rank tells of a pass only who has offered,
so a rank that nobody has offered anything sends nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hvlike.backends.network.offers import Data
from hvlike.backends.shared_memory.board import Board
from hvlike.collectives.controller.tensor_queue import TensorQueue, Watcher

PASS, HURRY = "pass", "hurry"
_NEVER = 1 << 62


class Offer(NamedTuple):
    kind: int  # The same on all ranks for the same kind of operation
    name: int
    data: Data | None = None


class Agreement(ABC):
    """One rank's view. Nothing here blocks."""

    stopped = False  # A peer has left, or this rank: nothing is agreed any more

    @abstractmethod
    def hear(self, rank: int, what: str, value: Any) -> None:
        """A peer says PASS or HURRY, of the operation with this number."""

    @abstractmethod
    def hurry(self, index: int) -> None:
        """This rank has waited for long for what it has offered."""

    @abstractmethod
    def begin_epoch(self, *, joined: bool) -> None:
        """The numbers of operations have gone up on all ranks; joined: all have joined, and ask for things again."""

    @abstractmethod
    def set_away(self, away: bool) -> None:
        """Whether this rank asks for nothing while the others go on (it has joined)."""

    @abstractmethod
    def stop(self) -> None:
        """Let nothing be agreed any more."""


class BoardAgreement(Agreement):
    """Between the ranks of a node."""

    def __init__(self, tensor_queue: TensorQueue, peers: Sequence[int], send: Callable[[int, str, Any], None]) -> None:
        """peers: the other members; send: brings a peer (rank, what, value), soon."""
        self._queue = tensor_queue
        self._peers = peers
        self._send = send
        self._board: Board | None = None
        self._bells: Sequence[Watcher] = ()
        self._away = False
        self._passed = 0  # Operations below this number

    def open(self, board: Board, bells: Sequence[Watcher]) -> None:
        """There is a board from now on. bells: of the peers, which may sleep over it."""
        with self._queue.lock:
            self._board, self._bells = board, bells
            self._queue.board = (board.count, bells)
            self._pass(max(self._passed, self._queue.entered))

    def hear(self, rank: int, what: str, value: Any) -> None:
        # Who hears PASS looks at the board again.
        if what == HURRY:
            with self._queue.lock:
                if value >= self._queue.entered:
                    self._pass(value + 1)
            self._send(rank, PASS, value)

    def hurry(self, index: int) -> None:
        for rank in self._peers:
            self._send(rank, HURRY, index)

    def begin_epoch(self, *, joined: bool) -> None:
        with self._queue.lock:
            self._away = self._away and not joined
            self._pass(self._queue.next_epoch if self._away else self._queue.entered)

    def set_away(self, away: bool) -> None:
        with self._queue.lock:
            self._away = away
            if away:
                # What has been passed stays passed. With the end of the join an epoch begins.
                self._pass(self._queue.next_epoch)

    def stop(self) -> None:
        with self._queue.lock:
            self.stopped = True
            self._pass(_NEVER)

    def _pass(self, count: int) -> None:
        self._passed = max(self._passed, count)
        if self._board is not None:
            self._board.passed(count)
            for bell in self._bells:
                bell.notify_if_sleeping()


class MessageAgreement(Agreement):
    """Between ranks of different nodes. Methods without a lock of their own need that of the tensor queue."""

    def __init__(self, tensor_queue: TensorQueue, peers: Sequence[int], send: Callable[[int, str, Any], None]) -> None:
        """peers: the other members; send: brings a peer (rank, what, value), soon."""
        self._queue = tensor_queue
        self._peers = peers
        self._send = send
        self._offers: dict[int, dict[int, Offer | None]] = {}  # By operation and rank; None: that rank has passed
        self._passed: set[int] = set()  # Operations that this rank has passed before it came to them
        self._index, self._mine = -1, Offer(0, 0)  # What this rank has offered and waits for
        self._away = False
        self.answer: bool | None = None  # Whether all do what this rank has offered; None: not known yet
        self.offers: dict[int, Offer | None] = {}  # What the peers have offered, once there is an answer
        # The tensor queue tells of the operations that it numbers while this is not 0.
        self.asleep = [0]
        with tensor_queue.lock:
            tensor_queue.board = ([0], [self])

    def may_offer(self, index: int) -> bool:
        return not (self.stopped or self._away or index in self._passed)

    def offer(self, index: int, mine: Offer) -> None:
        """This rank's operation is numbered, and offered: the caller sends `mine` to all peers, or abandons it."""
        self._index, self._mine, self.answer = index, mine, None
        if self._offers.setdefault(index, {}):
            self._decide()

    def notify_if_sleeping(self) -> None:
        """Pass what this rank has come to without an offer."""
        entered = self._queue.entered
        for index in [each for each in self._offers if each < entered and each != self._index]:
            self._pass(index)
        self._passed = {each for each in self._passed if each >= entered}
        self.asleep[0] = len(self._offers) + len(self._passed)

    # -- with a lock of their own ---------------------------------------------------------------

    def hear(self, rank: int, what: str, value: Any) -> None:
        with self._queue.lock:
            if what == PASS and value == self._index:
                self._offers[value].setdefault(rank, None)
                self._decide()
            elif what == HURRY and value >= self._queue.entered:
                self._pass(value)

    def take(self, rank: int, words: tuple[int, ...], data: Data | None = None) -> None:
        """A peer has made an offer. words: the number of its operation, kind and name, and one that is not used."""
        index, kind, name, _ = words
        offer = Offer(kind, name, data)
        with self._queue.lock:
            if index < self._queue.entered and index != self._index:
                # Where this rank has offered it too, both have the answer no, or will have it.
                self._send(rank, PASS, index)
                return
            self._offers.setdefault(index, {}).setdefault(rank, offer)
            if index == self._index:
                self._decide()
            elif self._away or index in self._passed:
                self._pass(index)
            else:
                self.asleep[0] = 1

    def hurry(self, index: int) -> None:
        with self._queue.lock:
            for rank in self._peers if self._index == index else ():
                if rank not in self._offers[index]:
                    self._send(rank, HURRY, index)

    def begin_epoch(self, *, joined: bool) -> None:
        with self._queue.lock:
            self.notify_if_sleeping()

    def set_away(self, away: bool) -> None:
        with self._queue.lock:
            self._away = away
            for index in list(self._offers) if away else ():
                if index != self._index:
                    self._pass(index)

    def stop(self) -> None:
        with self._queue.lock:
            self.stopped = True
            if self._index >= 0:
                self._end(False)

    def abandon(self, *, sent: bool) -> None:
        """This rank leaves in the middle; sent: its offer stands."""
        with self._queue.lock:
            index, self._index = self._index, -1
            if index >= 0 and not sent:
                self._pass(index)
            self._offers.pop(index, None)

    def _pass(self, index: int) -> None:
        self._passed.add(index)
        self.asleep[0] = 1
        for rank in self._offers.pop(index, ()):
            self._send(rank, PASS, index)

    def _decide(self) -> None:
        offers, mine = self._offers[self._index], self._mine
        for offer in offers.values():
            if offer is None or offer.kind != mine.kind or offer.name != mine.name:
                self._end(False)
                return
        if len(offers) == len(self._peers):
            self._end(True)

    def _end(self, answer: bool) -> None:
        self.offers = self._offers.pop(self._index)
        self._index, self.answer = -1, answer
