"""Random programs of torch.distributed over hvlike: groups, asynchronous work, point to point, objects."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import hvlike.torch_distributed.process_group  # noqa: F401 - what belongs to a rank is known before the job begins
from hvlike.system.system import system

# Their names until torch 2.10.
gather_into: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
scatter_sum: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

LENGTHS = (1, 3, 700, 20_000)
COLLECTIVES = (
    "sum",
    "max",
    "reduce",
    "broadcast",
    "gather all",
    "gather into",
    "gather",
    "scatter",
    "reduce scatter",
    "all to all",
    "rows to all",
    "barrier",
)
WAITS = ("wait", "look", "future")
AFTER = ("nothing", "objects", "ring", "anyone", "hvlike", "process set", "monitored")


@dataclass(frozen=True)
class Operation:
    """One operation of the members of a group, or a message from `root` to `target`; both are places in the group."""

    number: int
    what: str
    group: int
    length: int
    root: int
    target: int
    how: str
    """How each member waits for it."""

    @property
    def stream(self) -> tuple[int, ...]:
        """Operations of one stream are begun in the same order by all who take part."""
        return (self.group, self.root, self.target, self.tag) if self.what == "message" else (self.group,)

    @property
    def tag(self) -> int:
        """Of a message: some have the same."""
        return self.number % 2

    def takes_part(self, place: int) -> bool:
        """Whether a member does anything."""
        return self.what != "message" or place in (self.root, self.target)

    def value(self, place: int, factor: float = 1.0) -> Tensor:
        """What a member brings."""
        return torch.arange(self.length, dtype=torch.float) * factor + 10.0 * place + self.number

    def begin(self, ranks: Sequence[int], place: int, group: Any) -> Callable[[], None]:
        """Begin it; what is returned ends it and checks it."""
        size, root = len(ranks), self.root
        mine, values = self.value(place), [self.value(each) for each in range(size)]
        total = torch.stack(values).sum(0)
        options: dict[str, Any] = {"group": group, "async_op": True}
        blank = [torch.zeros(self.length) for _ in range(size)]
        lines = [self.value(place, 1.0 + each) for each in range(size)]  # What this member has for each other
        columns = [self.value(each, 1.0 + place) for each in range(size)]  # What each other has for it
        if self.what == "sum":
            return self._end(dist.all_reduce(mine, **options), [(mine, total)])
        if self.what == "max":
            return self._end(dist.all_reduce(mine, op=dist.ReduceOp.MAX, **options), [(mine, values[-1])])
        if self.what == "reduce":
            work = dist.reduce(mine, ranks[root], **options)
            return self._end(work, [(mine, total)] if place == root else [])
        if self.what == "broadcast":
            return self._end(dist.broadcast(mine, ranks[root], **options), [(mine, values[root])])
        if self.what == "gather all":
            return self._end(dist.all_gather(blank, mine, **options), zip(blank, values, strict=True))
        if self.what == "gather into":
            found = torch.zeros(size * self.length)
            return self._end(gather_into(found, mine, **options), [(found, torch.cat(values))])
        if self.what == "gather":
            work = dist.gather(mine, blank if place == root else None, ranks[root], **options)
            return self._end(work, zip(blank, values, strict=True) if place == root else [])
        if self.what == "scatter":
            work = dist.scatter(mine, lines if place == root else None, ranks[root], **options)
            return self._end(work, [(mine, self.value(root, 1.0 + place))])
        if self.what == "reduce scatter":
            found = torch.zeros(self.length)
            work = scatter_sum(found, torch.cat(lines), **options)
            return self._end(work, [(found, torch.stack(columns).sum(0))])
        if self.what == "all to all":
            return self._end(dist.all_to_all(blank, lines, **options), zip(blank, columns, strict=True))
        if self.what == "rows to all":
            # So many rows as the place of the receiver, plus one.
            counts, given = [place + 1] * size, list(range(1, size + 1))
            found = torch.zeros(sum(counts))
            rows = torch.full((sum(given),), float(place))
            work = dist.all_to_all_single(found, rows, counts, given, **options)
            return self._end(work, [(found, torch.arange(size).repeat_interleave(place + 1).float())])
        if self.what == "barrier":
            return self._end(dist.barrier(**options), [])
        assert self.what == "message"
        if place == self.target:
            blank[0].fill_(-1.0)
            work = dist.irecv(blank[0], ranks[root], group, self.tag)
            return self._end(work, [(blank[0], values[root])])
        return self._end(dist.isend(mine, ranks[self.target], group, self.tag), [(mine, values[place])])

    def _end(self, work: Any, expected: Any) -> Callable[[], None]:
        assert work is not None
        pairs = list(expected)

        def end() -> None:
            if self.how == "future" and self.what != "message":
                work.get_future().wait()
            while self.how == "look" and not work.is_completed():
                pass
            work.wait()
            for found, wanted in pairs:
                assert torch.equal(found, wanted), f"{self}: {found.flatten()[:4]}, expected {wanted.flatten()[:4]}"

        return end


@dataclass
class Run:
    """What happens between init_process_group and its end."""

    groups: list[tuple[list[int], bool]]
    """Ranks of each, the first one all; and whether only its members make it."""
    rounds: list[list[Operation]]
    after: list[str]
    """What all ranks do after a round."""
    apart: bool
    """Whether each group is destroyed by itself before the first one is."""


@dataclass
class Torch:
    """Runs of torch.distributed, one after the other."""

    seed: int
    runs: list[Run]

    @classmethod
    def draw(cls, seed: int, size: int) -> Torch:
        """Draw one."""
        draw = random.Random(seed)
        number = 0
        runs = []
        for _ in range(draw.choice([1, 1, 2])):
            groups = [(list(range(size)), False)]
            groups += [
                (sorted(draw.sample(range(size), draw.randint(1, size))), draw.random() < 0.4)
                for _ in range(draw.choice([0, 1, 2]))
            ]
            rounds = []
            for _ in range(draw.randint(1, 3)):
                operations = []
                for _ in range(draw.randint(1, 6)):
                    group = draw.randrange(len(groups))
                    members = len(groups[group][0])
                    root, target = draw.randrange(members), draw.randrange(members)
                    what = draw.choice(COLLECTIVES + ("message",) * 6 * (root != target))
                    length, how = draw.choice(LENGTHS), draw.choice(WAITS)
                    operations.append(Operation(number, what, group, length, root, target, how))
                    number += 1
                rounds.append(operations)
            after = [draw.choice(AFTER) for _ in rounds]
            runs.append(Run(groups, rounds, after, draw.random() < 0.3))
        return cls(seed, runs)

    def __call__(self, hvd: Any, rank: int) -> None:
        order = random.Random(1000 * self.seed + rank)
        for run in self.runs:
            dist.init_process_group("hvlike")
            assert dist.get_rank() == rank
            groups = [dist.group.WORLD]
            for ranks, local in run.groups[1:]:
                if rank in ranks or not local:
                    groups.append(dist.new_group(ranks, use_local_synchronization=local))
                else:
                    groups.append(None)
            for number, (operations, after) in enumerate(zip(run.rounds, run.after, strict=True)):
                self._round(operations, rank, run, groups, order)
                meet(hvd, rank, after, 9 + number)
            if run.apart:
                for (ranks, _), group in zip(run.groups[1:], groups[1:], strict=True):
                    if rank in ranks:
                        dist.destroy_process_group(group)
            dist.destroy_process_group()
            assert not dist.is_initialized()
        hvd.shutdown()

    def _round(
        self, operations: Sequence[Operation], rank: int, run: Run, groups: Sequence[Any], order: random.Random
    ) -> None:
        streams: dict[tuple[int, ...], deque[Operation]] = {}
        for each in operations:
            ranks = run.groups[each.group][0]
            if rank in ranks and each.takes_part(ranks.index(rank)):
                streams.setdefault(each.stream, deque()).append(each)
        ends = []
        while streams:
            stream = order.choice(list(streams))
            operation = streams[stream].popleft()
            if not streams[stream]:
                del streams[stream]
            ranks = run.groups[operation.group][0]
            ends.append(operation.begin(ranks, ranks.index(rank), groups[operation.group]))
        order.shuffle(ends)
        for end in ends:
            end()


def meet(hvd: Any, rank: int, how: str, tag: int) -> None:
    """Do something that blocks, the same on all ranks. tag: no other round has it; some ranks are there already."""
    size = dist.get_world_size()
    if how == "objects":
        objects: list[Any] = [None] * size
        dist.all_gather_object(objects, {"rank": rank})
        assert objects == [{"rank": each} for each in range(size)]
        given = [rank, "root"]
        dist.broadcast_object_list(given, src=size - 1)
        assert given == [size - 1, "root"]
    elif how == "ring" and size > 1:
        found = torch.zeros(20_000)
        give = dist.P2POp(dist.isend, torch.full((20_000,), float(rank)), (rank + 1) % size)
        take = dist.P2POp(dist.irecv, found, (rank - 1) % size)
        for work in dist.batch_isend_irecv([give, take]):
            work.wait()
        assert bool((found == (rank - 1) % size).all()), f"{found[:4]} from rank {(rank - 1) % size}"
    elif how == "anyone" and rank == 0:
        seen = set()
        for _ in range(size - 1):
            found = torch.zeros(700)
            source = dist.recv(found, tag=tag)
            assert bool((found == source).all())
            seen.add(source)
        assert seen == set(range(1, size))
    elif how == "anyone":
        if rank == size - 1 and tag % 3 == 0:
            # The others may have left by then. Bit by bit: that all sleep for long counts as a fault.
            for _ in range(20):
                system.sleep(0.1)
        dist.send(torch.full((700,), float(rank)), 0, tag=tag)
    elif how == "hvlike":
        total = hvd.allreduce(torch.full((3,), float(rank)), op=hvd.Sum, name="beside")
        assert total.tolist() == [size * (size - 1) / 2] * 3
    elif how == "process set" and size > 2:
        # Made later than the groups, it has a lower number than theirs.
        members = hvd.add_process_set(hvd.ProcessSet(range(size - 1)))
        if members.included():
            mine = torch.full((3,), float(rank))
            total = hvd.allreduce_async(mine, op=hvd.Sum, name="in the set", process_set=members).result()
            assert total.tolist() == [(size - 1) * (size - 2) / 2] * 3
        assert hvd.remove_process_set(members)
    elif how == "monitored":
        dist.monitored_barrier()
