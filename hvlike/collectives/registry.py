"""The process sets of this job: registered by init() or later, removed again; the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hvlike.collectives.agreement import name_ranks
from hvlike.collectives.membership import Membership, Switchboard, open_membership
from hvlike.collectives.process_set import ProcessSet, global_process_set
from hvlike.config import Knobs
from hvlike.errors import HorovodInternalError, ShutdownError, UsageError
from hvlike.transport.fabric import Fabric
from hvlike.transport.group import Group
from hvlike.transport.routine import Routine
from hvlike.transport.world import World


class Registry:
    """Numbers the sets and keeps this rank's memberships. Numbers are never used again."""

    def __init__(self, fabric: Fabric, knobs: Knobs, end: Callable[[HorovodInternalError], None]) -> None:
        """end: ends everything on this rank with an error."""
        self.memberships: dict[int, Membership] = {}
        self.sets: dict[int, ProcessSet] = {}
        self._fabric = fabric
        self._knobs = knobs
        self._end = end
        self._switchboard = Switchboard(fabric)
        self._next = 0

    def find(self, process_set: ProcessSet | None, what: str) -> Membership:
        """The set an operation runs in; None: all ranks.

        what: the operation, for the error texts.
        Raises: UsageError for a set that is not registered, or of which this rank is not a member.
        """
        if process_set is None or process_set is global_process_set:
            return self.memberships[0]
        if not isinstance(process_set, ProcessSet):
            raise UsageError(f"{what}: expected a ProcessSet, got {type(process_set).__name__}.")
        if not self.is_registered(process_set):
            raise UsageError(
                f"{what}: Process set provided does not exist, or has not been registered: {process_set}. Pass it to "
                "init(process_sets=[...]) or add_process_set() on every rank."
            )
        membership = self.memberships.get(process_set.process_set_id or 0)
        if membership is None:
            raise UsageError(
                f"{what}: Rank {self._fabric.world.rank} is not a member of the provided process set, which has "
                f"{name_ranks(process_set.ranks or [])}."
            )
        return membership

    def is_registered(self, process_set: ProcessSet) -> bool:
        """True for a set that is registered now."""
        number = process_set.process_set_id
        return number is not None and self.sets.get(number) is process_set

    def enroll(self, process_set: ProcessSet) -> Routine[None]:
        """Register a set that has been checked. Collective over the world, members and others, in the same order."""
        number = self._next
        self._next += 1
        ranks = process_set.ranks or []
        world = self._fabric.world
        if world.rank in ranks:
            group = Group(world, number, ranks)
            membership = yield from open_membership(self._fabric, group, self._switchboard, self._knobs, self._end)
            self.memberships[number] = membership
        self.sets[number] = process_set
        process_set.registered(number, ranks, world.rank)

    def dismiss(self, process_set: ProcessSet) -> Routine[None]:
        """Remove a set; what is in flight in it ends with ShutdownError. Collective over the world."""
        yield from ()
        number = process_set.process_set_id or 0
        membership = self.memberships.pop(number, None)
        if membership is not None:
            membership.fail(ShutdownError(f"the process set with {name_ranks(process_set.ranks or [])} was removed."))
            membership.close()
        del self.sets[number]
        process_set.removed()

    def close(self) -> None:
        """Give everything back. Collective over the world, after everything has ended."""
        for number in sorted(self.memberships):
            self.memberships[number].close()
        for process_set in self.sets.values():
            process_set.removed()


def what_is_wrong(ranks: Sequence[int], known: Sequence[Sequence[int]], size: int) -> str | None:
    """Why a set of these ranks cannot be registered beside those that are; None if it can.

    ranks: in rising order; known: the ranks of the sets there are.
    """
    if list(ranks) in [list(each) for each in known]:
        return f"Attempted to add a duplicate process set: there is one of ranks {list(ranks)}."
    if ranks[-1] >= size:
        return f"The process set {list(ranks)} names rank {ranks[-1]}, but the job has ranks 0 to {size - 1}."
    return None


def ranks_of(comm: Any, world: World) -> list[int]:
    """The ranks of a communicator in our numbering. Local.

    Raises: UsageError for a communicator with members outside the world.
    """
    members, everybody = comm.Get_group(), world.comm.Get_group()
    try:
        ranks = world.mpi.Group.Translate_ranks(members, list(range(members.Get_size())), everybody)
    finally:
        members.Free()
        everybody.Free()
    if world.mpi.UNDEFINED in list(ranks):
        raise UsageError("ProcessSet: the communicator has members outside the ranks that hvlike was started with.")
    return sorted(ranks)
