"""Calls of torch.distributed in four threads: python tests/support/soak/mixed_operations.py CALLS, under mpirun -n 4.

Each thread has a group of its own, and checks every result.
"""

import random
import sys
import threading
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from support.torch_distributed.operations import MOVING, REDUCING, Call, Done, Members

import hvlike  # noqa: F401  Registers the backend where it is on the path and not installed.

THREADS = 4
KINDS = (*REDUCING, *MOVING, "objects", "barrier", "ring")

wrong: list[object] = []


class Mixer(threading.Thread):
    """One thread, with a group that only threads of its number use."""

    def __init__(self, number: int, members: Members, operations: int) -> None:
        super().__init__()
        self.members, self.operations = members, operations
        self.draw = random.Random(number)  # The same on every rank
        self.pending: list[tuple[Call, Done]] = []

    def run(self) -> None:
        try:
            for turn in range(self.operations):
                kind = self.draw.choice(KINDS)
                length = self.draw.choice((1, 3, 100, 5000, 70_000))
                asynchronous, seed = self.draw.random() < 0.5, self.draw.randrange(100)
                if kind in ("objects", "barrier", "ring"):
                    getattr(self, kind)(length, turn)
                    continue
                op = self.draw.choice(("SUM", "MAX"))
                call = Call(kind, op, torch.float64, (length,), asynchronous=asynchronous, seed=seed)
                self.pending.append((call, call.run(self.members)))
                if not asynchronous or len(self.pending) >= self.draw.randrange(1, 12):
                    self.settle()
            self.settle()
        except Exception as error:
            wrong.append(repr(error))

    def settle(self) -> None:
        """Wait for all that was begun, and check it."""
        for call, done in self.pending:
            call.check(done)
        self.pending.clear()

    def objects(self, length: int, turn: int) -> None:
        got = [None] * self.members.size
        dist.all_gather_object(got, (self.members.place, turn), group=self.members.group)
        assert got == [(place, turn) for place in self.members.places]

    def barrier(self, length: int, turn: int) -> None:
        dist.barrier(self.members.group)

    def ring(self, length: int, turn: int) -> None:
        after, before = ((self.members.place + step) % self.members.size for step in (1, -1))
        got, sent = torch.zeros(length), torch.full((length,), float(self.members.place + turn))
        ranks, group = self.members.ranks, self.members.group
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, sent, ranks[after], group), dist.P2POp(dist.irecv, got, ranks[before], group)]
        )
        for work in works:
            work.wait()
        assert (got == before + turn).all()


def main() -> int:
    dist.init_process_group("hvlike", timeout=timedelta(seconds=60))
    rank, size = dist.get_rank(), dist.get_world_size()
    sets = [list(range(size)), list(range(1, size)) or [0], [0, size - 1], list(range(size))]
    groups = [dist.new_group(ranks) for ranks in sets]
    operations = int(sys.argv[1]) // THREADS
    mixers = [
        Mixer(number, Members(group, tuple(sets[number]), sets[number].index(rank)), operations)
        for number, group in enumerate(groups)
        if rank in sets[number]
    ]
    for mixer in mixers:
        mixer.start()
    for mixer in mixers:
        mixer.join()
    print(f"rank {rank}: wrong {len(wrong)} {wrong[:3]}", flush=True)
    wrong_on: list[int] = [0] * size
    dist.all_gather_object(wrong_on, len(wrong))
    if rank == 0 and not any(wrong_on):
        print("all well", flush=True)
    dist.destroy_process_group()
    return any(wrong_on)


if __name__ == "__main__":
    sys.exit(main())
