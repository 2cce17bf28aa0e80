"""Deadlock detection: which rank waits for which. No messages.

A rank that has waited a while reports for what. When every rank waits, and each waits for a rank that waits for
something else, nothing can happen any more: that is a deadlock, not a delay.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from hvlike.collectives.requests.join_protocol import merge_counts
from hvlike.collectives.requests.message_table import name_ranks
from hvlike.collectives.requests.request import RequestKey

Counts = Mapping[str, int]

STEP = "step"  # The kind under which a rank waits for a planned reduction; the name is the reducer's
PLAN = "plan"  # The kind under which it waits for an agreement on one, by the same name
GROUP = "group"  # The kind under which it waits for a call of a group of torch.distributed, by the group's name


@dataclass(frozen=True)
class WaitReport:
    key: RequestKey
    counts: Counts  # How many unnamed operations of each kind the rank has issued
    steps: Counts  # How many steps of each planned reduction the rank has entered
    certain: bool  # Nothing else on that rank can ask for what the others lack: one thread uses hvlike there
    since: float = 0.0  # When it was reported, in seconds of the coordinator's clock
    calls: Counts = field(default_factory=dict)  # How many calls the rank has made in each group of torch.distributed
    number: int = 0  # Of the call it waits for, if the kind is GROUP
    detail: str = ""  # That call, in words

    def __str__(self) -> str:
        return self.detail or f"{self.key[0]} {self.key[1]!r}"


@dataclass
class WaitForGraph:
    """The waits the members of a group have reported. Positions count within the group."""

    ranks: tuple[int, ...]
    waits: dict[int, WaitReport] = field(default_factory=dict)

    def report(self, position: int, waiting: WaitReport) -> None:
        self.waits[position] = waiting

    def resume(self, position: int) -> None:
        self.waits.pop(position, None)

    def ended(self, key: RequestKey) -> None:
        """The operation `key` has been decided, well or badly: no rank waits for another one there."""
        for position in [each for each, waiting in self.waits.items() if waiting.key == key]:
            del self.waits[position]

    def deadlocked(
        self,
        missing: Callable[[RequestKey], Sequence[int]],
        joined: Collection[int] = (),
        away: Collection[int] | None = None,
    ) -> bool:
        """True when all members wait, each for another one that has not joined or, for planned steps, is not away."""
        waits = {position: waiting for position, waiting in self.waits.items() if position not in joined}
        return (
            bool(waits)
            and len(waits) == len(self.ranks) - len(joined)
            and all(each.certain for each in waits.values())
            and all(self.lacking(each, missing, joined if away is None else away) for each in waits)
        )

    def lacking(
        self, position: int, missing: Callable[[RequestKey], Sequence[int]], away: Collection[int] = ()
    ) -> list[int]:
        """The ranks without which the wait of the member at `position` cannot end, as far as it is known."""
        waiting = self.waits[position]
        kind, name = waiting.key
        if kind == GROUP:
            return [self.ranks[position] for position in self._behind_in_group(waiting)]
        if kind != STEP:
            ranks = missing(waiting.key)
            # What it waits for was decided and is running, and others ask for their next one under this name.
            return [] if self.ranks[position] in ranks else list(ranks)
        entered = waiting.steps.get(name, 0)
        return [
            self.ranks[position]
            for position, other in self.waits.items()
            if position not in away and other.steps.get(name, 0) < entered
        ]

    def crossed(self, position: int) -> WaitForGraph | None:
        """A circle of waits for calls of groups, each for a member that waits in the next: no call of it can end.

        position: whose wait was reported last. A new circle leads through it.
        """
        came_from: dict[int, int] = {}
        ahead = [position]
        while ahead:
            here = ahead.pop()
            for behind in self._behind_in_group(self.waits[here]):
                waiting = self.waits[behind]
                if waiting.key[0] != GROUP or not waiting.certain or behind in came_from:
                    continue
                came_from[behind] = here
                ahead.append(behind)
                if behind == position:
                    circle = {position: waiting}
                    while here != position:
                        circle[here] = self.waits[here]
                        here = came_from[here]
                    return WaitForGraph(self.ranks, circle)
        return None

    def _behind_in_group(self, waiting: WaitReport) -> list[int]:
        """The members that have not made the call that is waited for, and wait themselves; none for other waits.

        Who has no such group, or has left it, is none that makes the call one day.
        """
        kind, name = waiting.key
        if kind != GROUP:
            return []
        number = waiting.number
        return [position for position, other in self.waits.items() if other.calls.get(name, number) < number]

    def waited_for(self) -> list[RequestKey]:
        return list(dict.fromkeys(each.key for each in self.waits.values()))

    def describe(self) -> str:
        """rank 0 waits in allreduce 'x', rank 1 waits in broadcast 'y'"""
        return ", ".join(
            f"rank {self.ranks[position]} waits in {waiting}" for position, waiting in sorted(self.waits.items())
        )

    def advice(self) -> str:
        if all(waiting.key[0] == GROUP for waiting in self.waits.values()):
            return (
                "Ranks that belong to the same groups of torch.distributed have to call them in the same order; look "
                "for a collective that only some ranks reach, or that they reach in another order."
            )
        steps = {waiting.key[1] for waiting in self.waits.values() if waiting.key[0] == STEP}
        anew = sorted(position for position, each in self.waits.items() if each.key[0] == PLAN and each.key[1] in steps)
        if anew:
            ranks = [self.ranks[position] for position in anew]
            return (
                f"{name_ranks(ranks).capitalize()} {'plans' if len(ranks) == 1 else 'plan'} the reduction of gradients "
                "again, as after a change of requires_grad or an add_param_group: make such a change on every rank, "
                "before the same step."
            )
        return (
            "Every rank has to call the same operations under the same names; look for a collective that only some "
            "ranks reach (inside `if rank == 0:`, say) or for names that differ. Ranks with different numbers of "
            "batches train inside of hvlike.join.Join, or call hvd.join() after their last one."
        )

    def aligned_counts(self) -> dict[str, int]:
        """Counts of unnamed operations from which all members can go on alike."""
        return merge_counts(each.counts for each in self.waits.values())
