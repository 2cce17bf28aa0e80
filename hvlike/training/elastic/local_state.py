"""What only one rank has (a ZeRO shard, the state of Adasum), kept so that it survives the loss of ranks.

At a commit each rank copies its own state and gets a copy of that of the rank before it. After a loss:

    commit 7 of ranks  0     1     2     3          ranks 1 and 2 are lost
    who has what       0, 3  1, 0  2, 1  3, 2       0 has the states 0 and 3, 3 has 3 and 2: that of rank 1 is lost

    as many ranks as before (a spare has taken over)   each rank gets the state of its number
    fewer or more ranks                                each rank reads the states of all, one after the other
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from hvlike.backends.base import Backend
from hvlike.collectives.api.broadcast import broadcast_
from hvlike.collectives.api.objects import allgather_object
from hvlike.collectives.api.outcome import settle
from hvlike.collectives.session.basics import rank, size
from hvlike.training.elastic.copies import flatten_state, read_state, resized
from hvlike.training.gradients.planned_queue import PlannedQueue
from hvlike.transport.loop.coroutine import Coroutine


@runtime_checkable
class LocalState(Protocol):
    """An object of a TorchState with a state that is another one on every rank, beside that of state_dict()."""

    def local_state_dict(self) -> dict[str, Any]:
        """Return what only this rank has, anything that pickles; empty on all ranks if there is no such thing. Local.

        Called at each commit; copied at once.
        """

    def load_local_state_dicts(self, states: Mapping[int, dict[str, Any]], ranks_before: int) -> None:
        """Go on from a commit. Collective: every rank is called, after load_state_dict, in a hvlike that runs anew.

        Args:
            states: What local_state_dict() has returned, by rank at that commit. With as many ranks as now: that of
                this rank alone. Else those of all ranks. `items()` hands out one after the other, once, and keeps none.
                Empty if there was no commit yet: the object keeps what it has. Also if they are lost: a call of
                load_state_dict, with what a checkpoint has, follows.
            ranks_before: How many ranks there were at that commit; 0 if there was none.
        """


def has_common_state(part: Any) -> bool:
    """Whether state_dict() of the part is to be saved: a ZeroRedundancyOptimizer has only a state of each rank."""
    return not getattr(part, "state_is_local", False)


def may_be_lost(part: Any) -> bool:
    """Whether training goes on without the part's local state where nobody has it any more."""
    return getattr(part, "may_be_lost", False)


class Held(NamedTuple):
    """What a rank says that it has of a commit: one of these for each time it was saved."""

    generation: int  # How many recoveries there were before
    ranks: int  # How many ranks there were then
    owners: Sequence[int]  # Whose states it has: its own first, then that of the rank before


def find_sources(told: Sequence[Sequence[Held]]) -> tuple[Held, dict[int, int]] | None:
    """Return the newest save of a commit, and which rank of now gives each state of it: its own, if it is there.

    A commit is saved again after a recovery. One of which a state is lost, or has not arrived everywhere, is only
    returned if all are like that. None if nobody has the commit. `told`: what each rank of now has.
    """
    saves = {each.generation: each for held in told for each in held}
    found = []
    for generation, save in sorted(saves.items(), reverse=True):
        sources: dict[int, int] = {}
        held = {rank: each.owners for rank, saved in enumerate(told) for each in saved if each.generation == generation}
        for place in range(2):
            for holder, owners in held.items():
                if place < len(owners):
                    sources.setdefault(owners[place], holder)
        found.append((save, sources))
    whole = [each for each in found if len(each[1]) == each[0].ranks]
    return next(iter([*whole, *found]), None)


@dataclass
class Commit:
    ranks: int
    flats: dict[int, Tensor]  # By rank at the commit; this rank's own first


class Found(NamedTuple):
    """The states of a commit: of how many ranks, what of it is here, and which rank of now gives each."""

    ranks: int  # 0: nobody has the commit
    here: Commit
    sources: Mapping[int, int]

    @property
    def lost(self) -> list[int]:
        """The ranks whose states nobody has any more; the same on every rank of now."""
        return [each for each in range(self.ranks) if each not in self.sources]


class LocalStates:
    """The states of one object at the last commits, as far as this rank has them."""

    def __init__(self, name: str) -> None:
        """name: of the object, the same on every rank."""
        self.commits: dict[tuple[int, int], Commit] = {}  # By number and generation
        self._name = name
        self._generation = 0
        self._given_up: list[Tensor] = []

    def save(self, number: int, read: Callable[[], dict[str, Any]]) -> None:
        """Keep a copy of this rank's state, and of its neighbour's, as commit `number`. Collective; blocks."""

        def copied() -> Tensor | None:
            state = read()
            return flatten_state(state, self._spare_memory()) if state else None

        own = settle(f"commit of {self._name}", copied, as_it_is=True)
        if own is None:
            return
        me, ranks = rank(), size()
        commit = Commit(ranks, {me: own})
        if ranks > 1:
            spare = self._spare_memory()
            what = f"{self._name}, commit {number}"
            commit.flats |= exchange(what, {(me + 1) % ranks: own}, lambda _, nbytes: resized(spare, nbytes))
        self._given_up = []
        self.commits[number, self._generation] = commit

    def forget(self, older_than: int) -> None:
        """Give up commits that nobody goes back to; the next save() uses their memory. Local."""
        self._keep(lambda key: key[0] >= older_than)

    def find(self, number: int, *, holds: bool = True) -> Found:
        """Agree where the states of a commit are. Collective; blocks.

        A rank that was not there calls it too, with holds=False. Later commits are given up.
        """
        if not holds:
            # What it may have from an earlier time is of another course of the training.
            self.commits.clear()
        own = [Held(key[1], each.ranks, list(each.flats)) for key, each in self.commits.items() if key[0] == number]
        told = allgather_object((self._generation, own), name=f"elastic.{self._name}.held")
        self._generation = 1 + max(generation for generation, _ in told)
        found = find_sources([held for _, held in told])
        if found is None:
            return Found(0, Commit(0, {}), {})
        save, sources = found
        self._keep(lambda key: key[0] < number or key == (number, save.generation))
        return Found(save.ranks, self.commits.get((number, save.generation), Commit(0, {})), sources)

    def give_back(self, found: Found, part: LocalState) -> None:
        """Load the states that were found into the object, whatever ranks there are now. Collective; blocks."""
        before, commit, sources = found
        if not before:
            # The ranks were lost before the first commit, or the object has no local state.
            part.load_local_state_dicts({}, 0)
            return
        if before == size():
            part.load_local_state_dicts({rank(): read_state(self._fetch(commit, sources))}, before)
            return
        arriving = ArrivingStates(before, lambda each: read_state(self._receive(commit, each, sources[each])))
        try:
            part.load_local_state_dicts(arriving, before)
        finally:
            # The other ranks wait for this one to take part in each.
            arriving.read_all()

    def give_up(self, found: Found, part: LocalState) -> None:
        """Have the object go on with what a checkpoint has, which is loaded next. Collective; blocks."""
        self.commits.clear()
        # Nobody has the commit any more where this was interrupted.
        part.load_local_state_dicts({}, found.ranks or size())

    def _fetch(self, commit: Commit, sources: Mapping[int, int]) -> Tensor:
        """This rank's state, from whoever has it. Collective where a rank does not have its own."""
        me = rank()
        if all(owner == holder for owner, holder in sources.items()):
            return commit.flats[me].clone()
        sends = {owner: commit.flats[owner] for owner, holder in sources.items() if holder == me and owner != me}
        came = exchange(f"{self._name}, given back", sends, lambda _, nbytes: resized(None, nbytes))
        return next(iter(came.values())) if came else commit.flats[me].clone()

    def _receive(self, commit: Commit, owner: int, holder: int) -> Tensor:
        """The state of one earlier rank, in memory of its own, on every rank. Collective."""
        name = f"elastic.{self._name}.{owner}"
        mine = holder == rank()
        length = torch.tensor([len(commit.flats[owner]) if mine else 0], device="cpu")
        broadcast_(length, holder, name=f"{name}.length")
        flat = commit.flats[owner].clone() if mine else resized(None, int(length))
        broadcast_(flat, holder, name=f"{name}.bytes")
        return flat

    def _keep(self, wanted: Callable[[tuple[int, int]], bool]) -> None:
        for key in [key for key in self.commits if not wanted(key)]:
            self._given_up = list(self.commits.pop(key).flats.values())

    def _spare_memory(self) -> Tensor | None:
        return self._given_up.pop(0) if self._given_up else None


class ArrivingStates(Mapping[int, dict[str, Any]]):
    """The states of all ranks, received in the order of their ranks when they are asked for.

    `states[rank]` keeps those that come before. `items()` and `values()` keep none: they can be read once.
    """

    def __init__(self, count: int, receive: Callable[[int], dict[str, Any]]) -> None:
        self._count = count
        self._receive = receive
        self._next = 0
        self._kept: dict[int, dict[str, Any]] = {}

    def __getitem__(self, number: int) -> dict[str, Any]:
        while self._next <= min(number, self._count - 1):
            came = self._next
            self._kept[came] = self._take()
        return self._kept[number]

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._count))

    def __len__(self) -> int:
        return self._count

    def items(self) -> Iterator[tuple[int, dict[str, Any]]]:  # type: ignore[override]  # a view would keep them
        """Hand out each rank and its state, which is not kept."""
        for number in range(self._count):
            yield number, self._kept.pop(number) if number < self._next else self._take()

    def values(self) -> Iterator[dict[str, Any]]:  # type: ignore[override]
        """Hand out each state, which is not kept."""
        return (state for _, state in self.items())

    def read_all(self) -> None:
        """Receive what was not asked for."""
        while self._next < self._count:
            self._take()

    def _take(self) -> dict[str, Any]:
        self._next += 1
        return self._receive(self._next - 1)


def exchange(what: str, sends: Mapping[int, Tensor], memory: Callable[[int, int], Tensor]) -> dict[int, Tensor]:
    """Send bytes to some ranks; return what has come, by sender. Collective; blocks.

    what: the same on every rank. sends: flat tensors of bytes in host memory, none empty, by rank. memory: makes that
    for what comes, from the sender's rank and the number of bytes.
    Raises: HorovodInternalError, if a rank is at other work or has left.
    """
    ranks = size()
    nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
    came: dict[int, Tensor] = {}

    def job(backend: Backend) -> Coroutine[int]:
        lengths = torch.zeros(2, ranks, dtype=torch.int64, device="cpu")
        for receiver, tensor in sends.items():
            lengths[0, receiver] = len(tensor)
        yield from backend.alltoall(*([each.view(1).view(torch.uint8) for each in row] for row in lengths))
        came.update({sender: memory(sender, count) for sender, count in enumerate(lengths[1].tolist()) if count})
        receives = [came.get(sender, nothing) for sender in range(ranks)]
        yield from backend.alltoall([sends.get(receiver, nothing) for receiver in range(ranks)], receives)
        return ranks

    # Not kept open: a rank could not join while it is.
    queue = PlannedQueue("elastic.local_state", described={"what": what})
    queue.run(job)
    queue.close()
    return came
