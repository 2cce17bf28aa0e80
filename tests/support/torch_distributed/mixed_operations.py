"""Mixed calls of torch.distributed in four threads, each with its own group; each checks every result.

mpirun -n 4 python mixed_operations.py OPERATIONS
"""

import random
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import hvlike  # noqa: F401  Registers the backend where it is on the path and not installed.

THREADS = 4
OPERATIONS = int(sys.argv[1])

wrong: list[object] = []
Call = tuple[Any, Callable[[], object]]  # The work, None where it is done; and what checks the result


def check(what: str, got: Tensor, expected: Tensor) -> None:
    if not torch.equal(got, expected):
        wrong.append((what, got.flatten()[:4].tolist(), expected.flatten()[:4].tolist()))


def value(place: int, length: int, turn: int) -> Tensor:
    return torch.arange(length, dtype=torch.float64) + 1000 * place + turn


class Mixer(threading.Thread):
    """One thread, with a group that only threads of its number use."""

    def __init__(self, number: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.ranks = group, dist.get_process_group_ranks(group)
        self.size, self.place = len(self.ranks), dist.get_rank(group)
        self.draw = random.Random(number)  # The same on every rank
        self.pending: list[Call] = []

    def run(self) -> None:
        try:
            for turn in range(OPERATIONS // THREADS):
                name = self.draw.choice(NAMES)
                length = self.draw.choice((1, 3, 100, 5000, 70_000))
                root, asynchronous = self.draw.randrange(self.size), self.draw.random() < 0.5
                work, after = getattr(self, name)(length, turn, root, asynchronous)
                if asynchronous and work is not None:
                    self.pending.append((work, after))
                else:
                    after()
                if len(self.pending) >= self.draw.randrange(1, 12):
                    self.settle()
            self.settle()
        except Exception as error:
            wrong.append(repr(error))

    def settle(self) -> None:
        for work, after in self.pending:
            work.wait()
            after()
        self.pending.clear()

    def mine(self, length: int, turn: int) -> Tensor:
        return value(self.place, length, turn)

    def all(self, length: int, turn: int) -> list[Tensor]:
        return [value(place, length, turn) for place in range(self.size)]

    def all_reduce(self, length: int, turn: int, root: int, asynchronous: bool) -> Call:
        x = self.mine(length, turn)
        work = dist.all_reduce(x, group=self.group, async_op=asynchronous)
        return work, lambda: check("all_reduce", x, sum(self.all(length, turn)))

    def reduce(self, length: int, turn: int, root: int, asynchronous: bool) -> Call:
        x = self.mine(length, turn)
        work = dist.reduce(x, self.ranks[root], dist.ReduceOp.MAX, group=self.group, async_op=asynchronous)
        return work, lambda: self.place != root or check("reduce", x, self.all(length, turn)[-1])

    def broadcast(self, length: int, turn: int, root: int, asynchronous: bool) -> Call:
        x = self.mine(length, turn)
        work = dist.broadcast(x, self.ranks[root], group=self.group, async_op=asynchronous)
        return work, lambda: check("broadcast", x, value(root, length, turn))

    def all_gather(self, length: int, turn: int, root: int, asynchronous: bool) -> Call:
        rows = [torch.zeros(length, dtype=torch.float64) for _ in range(self.size)]
        work = dist.all_gather(rows, self.mine(length, turn), group=self.group, async_op=asynchronous)
        return work, lambda: check("all_gather", torch.stack(rows), torch.stack(self.all(length, turn)))

    def reduce_scatter(self, length: int, turn: int, root: int, asynchronous: bool) -> Call:
        part = torch.zeros(length, dtype=torch.float64)
        whole = torch.cat([self.mine(length, turn)] * self.size)
        work = dist.reduce_scatter_single(part, whole, group=self.group, async_op=asynchronous)
        return work, lambda: check("reduce_scatter", part, sum(self.all(length, turn)))

    def all_to_all(self, length: int, turn: int, root: int, asynchronous: bool) -> Call:
        rows = torch.zeros(self.size * length, dtype=torch.float64)
        whole = torch.cat([self.mine(length, turn) + place for place in range(self.size)])
        work = dist.all_to_all_single(rows, whole, group=self.group, async_op=asynchronous)
        return work, lambda: check("all_to_all", rows, torch.cat(self.all(length, turn)) + self.place)

    def gather(self, length: int, turn: int, root: int, asynchronous: bool) -> Call:
        rows = [torch.zeros(length, dtype=torch.float64) for _ in range(self.size)] if self.place == root else None
        work = dist.gather(self.mine(length, turn), rows, self.ranks[root], group=self.group, async_op=asynchronous)
        return work, lambda: rows is None or check("gather", torch.stack(rows), torch.stack(self.all(length, turn)))

    def scatter(self, length: int, turn: int, root: int, asynchronous: bool) -> Call:
        part = torch.zeros(length, dtype=torch.float64)
        rows = self.all(length, turn) if self.place == root else None
        work = dist.scatter(part, rows, self.ranks[root], group=self.group, async_op=asynchronous)
        return work, lambda: check("scatter", part, self.mine(length, turn))

    def objects(self, length: int, turn: int, root: int, asynchronous: bool) -> Call:
        got = [None] * self.size
        dist.all_gather_object(got, (self.place, turn), group=self.group)
        expected = [(place, turn) for place in range(self.size)]
        return None, lambda: got == expected or wrong.append(("objects", got, expected))

    def barrier(self, length: int, turn: int, root: int, asynchronous: bool) -> Call:
        return dist.barrier(self.group, async_op=asynchronous), lambda: None

    def ring(self, length: int, turn: int, root: int, asynchronous: bool) -> Call:
        after, before = (self.place + 1) % self.size, (self.place - 1) % self.size
        got, sent = torch.zeros(length, dtype=torch.float64), self.mine(length, turn)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, self.ranks[after], self.group),
                dist.P2POp(dist.irecv, got, self.ranks[before], self.group),
            ]
        )
        for work in works:
            work.wait()
        return None, lambda: check("ring", got, value(before, length, turn))


NAMES = [name for name in vars(Mixer) if name not in ("run", "settle", "mine", "all") and not name.startswith("_")]


def main() -> int:
    dist.init_process_group("hvlike", timeout=timedelta(seconds=60))
    rank, size = dist.get_rank(), dist.get_world_size()
    sets = [list(range(size)), list(range(1, size)) or [0], [0, size - 1], list(range(size))]
    groups = [dist.new_group(sorted(set(ranks))) for ranks in sets]
    mixers = [Mixer(number, group) for number, group in enumerate(groups) if rank in sets[number]]
    for mixer in mixers:
        mixer.start()
    for mixer in mixers:
        mixer.join()
    print(f"rank {rank}: wrong {len(wrong)} {wrong[:3]}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
