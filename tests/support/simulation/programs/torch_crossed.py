"""Random programs of torch.distributed whose ranks call their groups in orders of their own: some can never end.

What a round comes to follows from the orders alone (`stuck`). Where all ranks get through, none may hear of a deadlock,
however late one is. Where some do not, they hear of it, each group that they wait in is lost, and they go on.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from support.simulation.programs.torch_groups import gather_into, scatter_sum

from hvlike.errors import DeadlockError
from hvlike.system.system import system

LATE = (0.0, 0.0, 0.0, 0.1, 0.6, 2.0)  # Seconds; who has waited for 0.5 reports it
WAITED_FOR = re.compile(r"rank (\d+) waits in call (\d+), (\w+), of the group '([^']*)'")


@dataclass(frozen=True)
class Call:
    """A collective of all members of a group, which needs all of them."""

    group: int
    blocks: bool
    """Whether the rank waits for it at once; else it does at the end of the round."""
    late: float
    """The rank comes so late to it."""


Orders = Sequence[Sequence[Call]]  # By rank


def stuck(groups: Sequence[Sequence[int]], orders: Orders) -> set[int]:
    """The ranks that do not get through their calls."""
    made = {(group, rank): 0 for group, ranks in enumerate(groups) for rank in ranks}
    place = [0] * len(orders)
    waits: list[tuple[int, int] | None] = [None] * len(orders)

    def ended(group: int, number: int) -> bool:
        return all(made[group, rank] >= number for rank in groups[group])

    moved = True
    while moved:
        moved = False
        for rank, calls in enumerate(orders):
            waiting = waits[rank]
            if waiting is not None and not ended(*waiting):
                continue
            waits[rank] = None
            if place[rank] < len(calls):
                call = calls[place[rank]]
                place[rank] += 1
                made[call.group, rank] += 1
                if call.blocks:
                    waits[rank] = call.group, made[call.group, rank]
                moved = True
    left = {rank for (group, rank), number in made.items() if not ended(group, number)}  # At the end of the round
    return left.union(rank for rank, waiting in enumerate(waits) if waiting is not None)


@dataclass
class Round:
    """Groups, and what each rank calls in them."""

    groups: list[list[int]]
    orders: list[list[Call]]
    kinds: dict[tuple[int, int], str]
    """What the call of a group with this number is."""


@dataclass
class Crossed:
    """Rounds, each with groups of its own."""

    rounds: list[Round]

    @classmethod
    def draw(cls, seed: int, size: int) -> Crossed:
        """Draw one."""
        draw = random.Random(seed)
        rounds = []
        for _ in range(draw.randint(1, 2)):
            groups = [sorted(draw.sample(range(size), draw.randint(2, size))) for _ in range(draw.randint(2, 4))]
            calls = [draw.randrange(len(groups)) for _ in range(draw.randint(2, 6))]
            swaps = draw.choice([0, 0, 1, 1, 3])
            orders = []
            for rank in range(size):
                mine = [group for group in calls if rank in groups[group]]
                for _ in range(swaps if len(mine) > 1 and draw.random() < 0.6 else 0):
                    place = draw.randrange(len(mine) - 1)
                    mine[place], mine[place + 1] = mine[place + 1], mine[place]
                orders.append([Call(group, draw.random() < 0.8, draw.choice(LATE)) for group in mine])
            kinds = {
                (group, number): draw.choice(["sum", "barrier", "gather", "scatter"])
                for group in range(len(groups))
                for number in range(1, calls.count(group) + 1)
            }
            rounds.append(Round(groups, orders, kinds))
        return cls(rounds)

    def __call__(self, hvd: Any, rank: int) -> None:
        dist.init_process_group("hvlike")
        for each in self.rounds:
            groups = [dist.new_group(ranks) for ranks in each.groups]
            lost = Caller(each, groups, rank).run()
            count = hvd.allreduce(torch.tensor([float(lost)]), op=hvd.Sum)
            assert bool(count > 0) == bool(stuck(each.groups, each.orders)), f"{int(count)} ranks have lost a group"
            for ranks, group in zip(each.groups, groups, strict=True):
                if rank in ranks:
                    dist.destroy_process_group(group)
        dist.destroy_process_group()
        hvd.shutdown()


class Caller:
    """One rank in one round."""

    def __init__(self, played: Round, groups: Sequence[Any], rank: int) -> None:
        self._round = played
        self._groups = groups
        self._rank = rank
        self._made = dict.fromkeys(range(len(groups)), 0)
        self._lost = False

    def run(self) -> bool:
        """Make all calls; whether a group was lost."""
        left = []
        for call in self._round.orders[self._rank]:
            for _ in range(round(10 * call.late)):
                system.sleep(0.1)
            number = self._made[call.group] = self._made[call.group] + 1
            end = self._begin(call.group, number)
            if call.blocks:
                self._wait(call.group, number, end)
            else:
                left.append((call.group, number, end))
        for group, number, end in left:
            self._wait(group, number, end)
        return self._lost

    def _begin(self, group: int, number: int) -> Callable[[], None]:
        """Make a call; what is returned ends it and checks it."""
        size, options = len(self._round.groups[group]), {"group": self._groups[group], "async_op": True}
        place = self._round.groups[group].index(self._rank)
        kind = self._round.kinds[group, number]
        found, wanted = torch.full((3,), float(place)), torch.full((3,), size * (size - 1) / 2)
        if kind == "sum":
            work = dist.all_reduce(found, **options)
        elif kind == "gather":
            mine, found = found, torch.zeros(3 * size)
            wanted = torch.arange(size).repeat_interleave(3).float()
            work = gather_into(found, mine, **options)
        elif kind == "scatter":
            mine, found = found.repeat(size), torch.zeros(3)
            work = scatter_sum(found, mine, **options)
        else:
            found = wanted
            work = dist.barrier(**options)

        def end() -> None:
            work.wait()
            assert torch.equal(found, wanted), f"{kind}: {found}, expected {wanted}"

        return end

    def _wait(self, group: int, number: int, end: Callable[[], None]) -> None:
        """Wait for a call; it may end with the group."""
        try:
            end()
        except DeadlockError as error:
            self._lost = True
            check(str(error), self._rank, self._round.groups, self._round.orders)


def check(text: str, rank: int, groups: Sequence[Sequence[int]], orders: Orders) -> None:
    """Check what an error says: each rank waits for one that waits in another group."""
    waits: Mapping[int, str] = {int(who): where for who, _, _, where in WAITED_FOR.findall(text)}
    assert len(waits) > 1, text
    assert len(set(waits.values())) > 1, text
    assert set(waits) <= stuck(groups, orders), f"rank {rank}: {text}"
