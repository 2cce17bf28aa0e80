"""Random operations, all checked: python tests/support/soak/random_operations.py OPERATIONS, under mpirun -n 4.

What happens is drawn from one seed on every rank; the order in which a rank submits, from a seed of its own. Ends with
nothing left over, and with memory that has stopped growing. Every rank prints what came out.
"""

import contextlib
import ctypes
import gc
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil
import torch
from support.collectives.inputs import DTYPES, OPS, contribution, defined, reduced, same
from support.collectives.operations import KINDS, SCATTERING, Operation

import hvlike as hvd
from hvlike.collectives.session.context import current
from hvlike.errors import HorovodInternalError, MismatchError, UsageError

SHAPES = [(), (0,), (1,), (5,), (3, 4), (2, 3, 4), (31, 7), (6, 0, 2)]
LARGE = (90_001,)
MOST_SETS = 6
GROWTH_MIB = 10.0
"""Of resident memory, in the last two thirds, in which process sets come and go."""

REDUCTIONS = [(op, dtype) for op in OPS for dtype in DTYPES if defined(op, dtype)]
SUMS = [(op, dtype) for op, dtype in REDUCTIONS if op in (hvd.Sum, hvd.Average)]


class Program:
    """The state of one rank."""

    def __init__(self) -> None:
        self.everybody = list(range(hvd.size()))
        self.shared = random.Random(20)
        self.own = random.Random(1000 + hvd.rank())
        self.sets: list[hvd.ProcessSet] = []
        self.done = 0
        self.errors = 0
        self.joins = 0
        self.sets_made = 0

    def draw(self) -> Operation:
        kind = self.shared.choice(KINDS)
        op, dtype = self.shared.choice(SUMS if kind in SCATTERING else REDUCTIONS)
        shape = LARGE if self.shared.random() < 0.01 else self.shared.choice(SHAPES)
        return Operation(kind, op, dtype, shape, self.shared.randrange(5), self.shared.randrange(10_000))

    def ranks_of(self, where: Any) -> list[int]:
        return self.everybody if where is None else list(where.ranks)

    def batch(self) -> None:
        """Some operations at once; named ones in another order on each rank, unnamed ones in the drawn order."""
        drawn = []
        for number in range(self.shared.randrange(1, 40)):
            name = None if self.shared.random() < 0.3 else f"operation {number}"
            spoilt = self.shared.random() < 0.04
            drawn.append((self.draw(), self.shared.choice([None, *self.sets]), name, spoilt))
        self.done += len(drawn)
        order = list(range(len(drawn)))
        self.own.shuffle(order)
        unnamed = iter([index for index in range(len(drawn)) if drawn[index][2] is None])
        order = [next(unnamed) if drawn[index][2] is None else index for index in order]
        flying = []
        for operation, where, name, spoilt in (drawn[index] for index in order):
            ranks = self.ranks_of(where)
            if hvd.rank() not in ranks:
                continue
            if self.own.random() < 0.02:
                self.misuse()
            if spoilt and len(ranks) > 1:
                odd = torch.ones(3, 2, dtype=torch.float32 if hvd.rank() == ranks[-1] else torch.float64)
                handle = hvd.allreduce_async(odd, name=f"{name} spoilt", process_set=where) if name else None
                if handle is not None:
                    flying.append((handle, None, [], ranks))
                continue
            tensors = operation.given(hvd.rank(), ranks)
            flying.append((operation.submit(hvd, tensors, name, ranks, where), operation, tensors, ranks))
        self.own.shuffle(flying)
        for handle, wanted, tensors, ranks in flying:
            if wanted is not None:
                wanted.check(hvd.synchronize(handle), tensors, hvd.rank(), ranks)
            else:
                with expected_error(MismatchError):
                    hvd.synchronize(handle)
                self.errors += 1

    def misuse(self) -> None:
        """Wrong arguments on this rank alone: nothing is sent, nobody notices."""
        wrong = self.own.randrange(3)
        with expected_error(UsageError):
            if wrong == 0:
                hvd.allreduce_async("no tensor", name="misuse")
            elif wrong == 1:
                hvd.broadcast_async(torch.ones(2), hvd.size() + 5, name="misuse")
            else:
                hvd.alltoall_async(torch.ones(2, 2), [-1] * hvd.size(), name="misuse")
        self.errors += 1

    def change_sets(self) -> None:
        """Add a set of random ranks, or remove one."""
        if len(self.sets) == MOST_SETS or (self.sets and self.shared.random() < 0.4):
            gone = self.sets.pop(self.shared.randrange(len(self.sets)))
            assert hvd.remove_process_set(gone)
            assert gone.process_set_id is None
            return
        ranks = sorted(self.shared.sample(self.everybody, self.shared.randrange(1, hvd.size())))
        if ranks in [each.ranks for each in self.sets]:
            with expected_error(UsageError):
                hvd.add_process_set(ranks)
            self.errors += 1
        else:
            self.sets_made += 1
            self.sets.append(hvd.add_process_set(ranks))

    def join(self) -> None:
        """Each rank has another number of steps; those that are through join."""
        steps = [self.shared.randrange(4) for _ in self.everybody]
        refused = self.shared.random() < 0.3
        drawn = [(*self.shared.choice(REDUCTIONS), self.shared.randrange(100)) for _ in range(max(steps, default=0))]
        for step in range(steps[hvd.rank()]):
            op, dtype, seed = drawn[step]
            active = [rank for rank in self.everybody if steps[rank] > step]
            mine = contribution(hvd.rank(), (7,), dtype, seed)
            parts = [contribution(rank, (7,), dtype, seed) for rank in active]
            total = hvd.allreduce(mine, op=op, name=f"step {step}")
            if op is hvd.Average:
                parts += [torch.zeros_like(mine)] * (hvd.size() - len(active))
            same(total, reduced(op, parts))
            self.done += 1
            if refused and len(active) < hvd.size() and step == max(steps) - 1:
                with expected_error(HorovodInternalError):
                    hvd.allgather(mine, name="while joined")
                self.errors += 1
        last = hvd.join()
        assert hvd.allgather_object(last) == [last] * hvd.size()
        self.joins += 1


@contextlib.contextmanager
def expected_error(kind: type[Exception]) -> Any:
    try:
        yield
    except kind:
        return
    raise AssertionError(f"rank {hvd.rank()}: expected {kind.__name__}")


def opened() -> dict[str, int]:
    """What this process holds open."""
    gc.collect()
    return {
        "sets": len(current().registry.set_states),
        "files": len(os.listdir("/proc/self/fd")),
        "mappings": Path("/proc/self/maps").read_text().count("memfd:hvlike"),
        "in /dev/shm": sum("hvlike" in each for each in os.listdir("/dev/shm")),
    }


def resident() -> float:
    """MiB of memory that are in use; what the C library only keeps for later is given back first."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return float(psutil.Process().memory_info().rss / (1 << 20))


def in_flight() -> dict[str, int]:
    """What has not ended in this process, or has broken."""
    context = current()
    set_states = list(context.registry.set_states.values())
    counts = [each.controller.in_flight() for each in set_states]
    return {
        **{what: sum(each[what] for each in counts) for what in ("requests", "pending", "waiting")},
        "busy queues": sum(not queue.idle for each in set_states for queue in each.queues.all()),
        "broken queues": sum(queue.broken is not None for each in set_states for queue in each.queues.all()),
    }


def main(count: int) -> None:
    hvd.init()
    program = Program()
    for _ in range(10):
        # So many make the inline allreduce, which stays.
        hvd.allreduce(torch.zeros(1), name="to open the inline allreduce")
    hvd.barrier()
    before = opened()
    warm = 0.0
    rounds = 0
    while program.done < count:
        rounds += 1
        program.batch()
        if rounds % 3 == 0:
            program.change_sets()
        if rounds % 10 == 0:
            program.join()
        if rounds % 5 == 0:
            hvd.barrier(process_set=None)
        # The ranks have done different numbers of operations: together they decide when to end.
        program.done = int(hvd.allreduce(torch.tensor(program.done), op=hvd.Min, name="done"))
        if not warm and program.done > count // 3:
            warm = resident()
    while program.sets:
        assert hvd.remove_process_set(program.sets.pop())
    hvd.barrier()
    growth = resident() - warm
    after = opened()
    left = {what: after[what] - before[what] for what in before} | in_flight()
    report = {
        "operations": program.done,
        "errors": program.errors,
        "sets": program.sets_made,
        "joins": program.joins,
        "left over": {what: number for what, number in left.items() if number},
        "growth": round(growth, 1),
    }
    print(json.dumps(report), flush=True)
    assert growth < GROWTH_MIB, f"rank {hvd.rank()} has grown by {growth:.1f} MiB"
    assert not report["left over"], f"rank {hvd.rank()} is not empty: {report['left over']}"
    # Else it has not tried what it is for.
    assert min(program.errors, program.sets_made, program.joins) >= count // 400, report
    # Without another collective: the coordinator may still be looking for what is left over.
    if hvd.rank() == 0:
        print("all well", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]))
