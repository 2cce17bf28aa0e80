"""Operations by name, steps of an optimizer, joins, mistakes: the kinds named, planned, join, mistakes and stuck."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from support.simulation.programs.parts import (
    KINDS_OF_OPERATIONS,
    LENGTHS,
    Operation,
    expect,
    loss_of,
    make_model,
)
from torch import Tensor


@dataclass
class Named:
    """Rounds of operations; in each every rank begins them in an order of its own, and then ends them."""

    rounds: list[list[Operation]] = field(default_factory=list)
    sets: list[list[int]] = field(default_factory=list)
    seed: int = 0
    ends_together: bool = True  # By a barrier

    @classmethod
    def draw(cls, seed: int, size: int) -> Named:
        """Draw one."""
        draw = random.Random(seed)
        sets = [sorted(draw.sample(range(size), draw.randint(1, size - 1)))] if size > 1 and draw.random() < 0.4 else []
        program = cls([], sets, seed)
        number = 0
        for _ in range(draw.randint(1, 4)):
            operations = []
            for _ in range(draw.randint(1, 4)):
                members = draw.choice([list(range(size)), *sets])
                what = draw.choice(KINDS_OF_OPERATIONS)
                operations.append(Operation(number, what, draw.choice(LENGTHS), draw.randrange(size), members))
                number += 1
            program.rounds.append(operations)
        if draw.random() < 0.4:
            # Names come again, as in the steps of a training.
            for operations in program.rounds:
                for number, each in enumerate(operations):
                    each.number = number
        program.ends_together = draw.random() < 0.5
        return program

    def __call__(self, hvd: Any, rank: int) -> None:
        order = random.Random(1000 * self.seed + rank)
        hvd.init()
        size = hvd.size()
        sets = {tuple(ranks): hvd.add_process_set(ranks) for ranks in self.sets}
        for operations in self.rounds:
            mine = [each for each in operations if rank in each.members]
            order.shuffle(mine)
            ends = [each.begin(hvd, rank, sets.get(tuple(each.members), hvd.global_process_set)) for each in mine]
            order.shuffle(ends)
            for end in ends:
                end()
            if self.seed % 3 == 0:
                # Without handles, the same on all ranks: the calling thread reduces by itself where it can.
                found = hvd.allreduce(torch.full((3,), float(rank)), op=hvd.Sum)
                expect(found, torch.full((3,), size * (size - 1) / 2), f"rank {rank}: inline")
        if self.seed % 2:
            expect(hvd.allgather_object(rank), list(range(size)), f"rank {rank}: objects")
        if self.ends_together:
            hvd.barrier()
        hvd.shutdown()


@dataclass
class Planned:
    """Steps of a DistributedOptimizer; for each: how many local passes come first, and whether a layer is frozen."""

    steps: list[tuple[int, bool]]

    @classmethod
    def draw(cls, seed: int, size: int) -> Planned:
        """Draw one."""
        draw = random.Random(seed)
        return cls([(draw.choice([0, 0, 1]), draw.random() < 0.2) for _ in range(draw.randint(1, 6))])

    def __call__(self, hvd: Any, rank: int) -> None:
        hvd.init()
        model = make_model()
        sgd = torch.optim.SGD(model.parameters(), lr=0.05)
        optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())
        for step, (local, frozen) in enumerate(self.steps):
            optimizer.zero_grad()
            model[0].requires_grad_(not frozen)
            for _ in range(local):
                with optimizer.no_sync():
                    loss_of(model, step, rank).backward()
            loss_of(model, step, rank).backward()
            optimizer.step()
        for found, wanted in zip(model.parameters(), self.alone(hvd.size()), strict=True):
            expect(found.detach(), wanted.detach(), f"rank {rank}: parameters")
        hvd.shutdown()

    def alone(self, size: int) -> list[Tensor]:
        """What one process that has the inputs of all ranks comes to."""
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step, (local, frozen) in enumerate(self.steps):
            optimizer.zero_grad()
            model[0].requires_grad_(not frozen)
            for rank in range(size):
                (loss_of(model, step, rank) * (1 + local) / size).backward()
            optimizer.step()
        return list(model.parameters())


@dataclass
class Uneven:
    """Epochs in which each rank has its own number of inputs, ended by a Join context or by hvd.join()."""

    counts: list[list[int]]
    calls: list[bool]
    beside: list[int]
    """How long a reduction is that is under way during each epoch; 0: none."""

    @classmethod
    def draw(cls, seed: int, size: int) -> Uneven:
        """Draw one."""
        draw = random.Random(seed)
        epochs = draw.randint(1, 3)
        counts = [[draw.choice([0, 1, 2, 4]) for _ in range(size)] for _ in range(epochs)]
        calls = [draw.random() < 0.4 for _ in range(epochs)]
        return cls(counts, calls, [draw.choice([0, 0, 4, 20_000]) for _ in range(epochs)])

    def __call__(self, hvd: Any, rank: int) -> None:
        from hvlike.join import Join

        hvd.init()
        model = make_model()
        sgd = torch.optim.SGD(model.parameters(), lr=0.05)
        optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())

        def train(steps: int) -> None:
            for step in range(steps):
                optimizer.zero_grad()
                loss_of(model, step, rank).backward()
                optimizer.step()

        for epoch, (counts, calls, beside) in enumerate(zip(self.counts, self.calls, self.beside, strict=True)):
            # With something under way the background thread drives, and the main thread is late to do so.
            mine, ranks = torch.full((beside,), float(rank)), hvd.size()
            handle = hvd.allreduce_async_(mine, op=hvd.Sum, name=f"beside {epoch}") if beside else None
            if calls:
                train(counts[rank])
                last = hvd.join()
                assert 0 <= last < hvd.size()
                hvd.broadcast_parameters(model.state_dict(), root_rank=last)
            else:
                with Join([optimizer]):
                    train(counts[rank])
            if handle is not None:
                expect(hvd.synchronize(handle), torch.full((beside,), ranks * (ranks - 1) / 2), f"rank {rank}: beside")
            everybody = hvd.allgather_object([each.tolist() for each in model.parameters()])
            assert all(each == everybody[0] for each in everybody), f"rank {rank}: the ranks have parted"
        for found, wanted in zip(model.parameters(), self.alone(hvd.size()), strict=True):
            expect(found, wanted, f"rank {rank}: parameters")
        hvd.shutdown()

    def alone(self, size: int) -> list[Tensor]:
        """What one process that has the inputs of all ranks comes to."""
        model = make_model()
        sgd = torch.optim.SGD(model.parameters(), lr=0.05)
        for counts in self.counts:
            for step in range(max(counts)):
                sgd.zero_grad()
                for rank in (each for each, count in enumerate(counts) if step < count):
                    (loss_of(model, step, rank) / size).backward()
                sgd.step()
        return [each.detach() for each in model.parameters()]


@dataclass
class Mistaken:
    """Good operations, and one that differs on a rank: all ranks get an error, and go on."""

    kinds: list[str]
    culprits: list[int]

    @classmethod
    def draw(cls, seed: int, size: int) -> Mistaken:
        """Draw one."""
        draw = random.Random(seed)
        kinds = [draw.choice(["shape", "dtype", "none"]) for _ in range(draw.randint(1, 3))]
        return cls([*kinds, draw.choice(["none", "leaves"])], [draw.randrange(size) for _ in range(len(kinds) + 1)])

    def __call__(self, hvd: Any, rank: int) -> None:
        from hvlike.errors import MismatchError, PeerLeftError, ShutdownError

        hvd.init()
        for number, (kind, culprit) in enumerate(zip(self.kinds, self.culprits, strict=True)):
            wrong = rank == culprit and hvd.size() > 1
            tensor = torch.ones(3)
            if kind == "shape" and wrong:
                tensor = torch.ones(4)
            elif kind == "dtype" and wrong:
                tensor = torch.ones(3, dtype=torch.float64)
            elif kind == "leaves" and wrong:
                break
            try:
                found = hvd.allreduce(tensor, name=f"{kind} {number}")
            except MismatchError:
                assert kind in ("shape", "dtype")
            except (PeerLeftError, ShutdownError):
                assert kind == "leaves"
                break
            else:
                assert kind == "none" or hvd.size() == 1, f"rank {rank}: no error for {kind}"
                expect(found, torch.ones(3, dtype=found.dtype), f"rank {rank}: {kind}")
        hvd.shutdown()


@dataclass
class Stuck:
    """Rounds in which a rank joins, and the others ask for what only they ask for: an error on them, and they go on."""

    joiners: list[int]
    late: list[float]  # After so many seconds; the others report that they wait after 0.5

    @classmethod
    def draw(cls, seed: int, size: int) -> Stuck:
        """Draw one."""
        draw = random.Random(seed)
        rounds = range(draw.randint(1, 3))
        return cls([draw.randrange(size) for _ in rounds], [draw.choice([0.0, 0.0, 0.49, 0.51, 0.7]) for _ in rounds])

    def __call__(self, hvd: Any, rank: int) -> None:
        from hvlike.errors import DeadlockError
        from hvlike.system.system import system

        hvd.init()
        active = hvd.size() - 1
        for number, (joiner, late) in enumerate(zip(self.joiners, self.late, strict=True)):
            if rank == joiner:
                system.sleep(late)
            else:
                try:
                    hvd.allreduce(torch.ones(1), name=f"only on {rank} {number}")
                except DeadlockError:
                    assert active > 1, "nobody else is active"
                else:
                    assert active == 1, f"rank {rank} has reduced alone"
                found = hvd.allreduce(torch.ones(1), op=hvd.Sum, name=f"together {number}")
                expect(found, torch.full((1,), float(active)), f"rank {rank}: together {number}")
            hvd.join()
        hvd.shutdown()
