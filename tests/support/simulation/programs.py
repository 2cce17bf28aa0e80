"""Random programs for simulated jobs, by kind and seed, and what they have to end with.

    named      operations of all kinds, in process sets too, begun in another order on each rank
    calls      every call of the API, polled, waited for late or never, from two threads, in sessions (call_programs.py)
    inline     reductions in the calling thread, for which ranks are late (call_programs.py)
    threads    operations that the threads of each rank divide in another way (call_programs.py)
    prompt     operations after which ranks stay away; who is late was not woken (prompt_programs.py)
    planned    training with DistributedOptimizer, with local passes and frozen layers
    join       ranks with different numbers of inputs, by Join and by hvd.join()
    mistakes   operations that differ between the ranks, or that a rank leaves for good
    stuck      a rank joins, the others ask for different operations, and go on after the error
    lost       a rank that is killed, fails or leaves (lost_programs.py)
    elastic    ranks that are lost under fault tolerance, and the others go on (elastic_programs.py)
    rpc        calls that make further calls, RRefs passed on and kept, sessions one after the other
    leavers    sessions of RPC that some ranks leave while others call them
    autograd   distributed backward in all modes, several at a time, and steps of distributed optimizers
    torch      groups of torch.distributed, asynchronous work waited for in another order, point to point, objects
    training   every wrapper: process sets, compression, ZeRO, clipping, other threads, timelines (training_programs.py)
    fuzz       the training programs of scripts/fuzz, with their oracle (fuzz_programs.py)

Every rank checks its own values against arithmetic, and raises AssertionError.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from support.simulation.autograd_programs import Autograd
from support.simulation.rpc_leavers import Leavers
from support.simulation.rpc_programs import Rpc
from support.simulation.torch_programs import Torch
from torch import Tensor, nn

LENGTHS = (1, 3, 700, 20_000)


def expect(found: Any, wanted: Any, what: str) -> None:
    """Compare tensors, or plain values."""
    if isinstance(wanted, Tensor):
        assert found.shape == wanted.shape, f"{what}: {list(found.shape)}, expected {list(wanted.shape)}"
        assert torch.allclose(found, wanted), f"{what}: {found.flatten()[:4]}, expected {wanted.flatten()[:4]}"
    else:
        assert found == wanted, f"{what}: {found}, expected {wanted}"


@dataclass
class Operation:
    """One operation, as each member of its set makes it."""

    number: int
    what: str
    length: int
    root: int
    members: Sequence[int]

    def begin(self, hvd: Any, rank: int, process_set: Any) -> Callable[[], None]:
        """Begin it; what is returned ends it and checks it."""
        name = f"{self.what} {self.number}"
        size, place = len(self.members), self.members.index(rank)
        mine = torch.arange(self.length, dtype=torch.float64) + 10.0 * place
        everybody = [torch.arange(self.length, dtype=torch.float64) + 10.0 * each for each in range(size)]
        options = {"name": name, "process_set": process_set}
        total = torch.stack(everybody).sum(0)

        def ending(handle: Any, wanted: Any) -> Callable[[], None]:
            return lambda: expect(hvd.synchronize(handle), wanted, f"rank {rank}: {name}")

        if self.what == "sum":
            return ending(hvd.allreduce_async(mine, op=hvd.Sum, **options), total)
        if self.what == "average":
            return ending(hvd.allreduce_async(mine, op=hvd.Average, **options), total / size)
        if self.what == "max":
            return ending(hvd.allreduce_async(mine, op=hvd.Max, **options), everybody[-1])
        if self.what == "gather":
            rows = [torch.full((each % 3, 2), float(each)) for each in range(size)]
            return ending(hvd.allgather_async(rows[place], **options), torch.cat(rows))
        if self.what == "broadcast":
            root = self.root % size
            return ending(hvd.broadcast_async(mine, self.members[root], **options), everybody[root])
        assert self.what == "group"
        handle = hvd.grouped_allreduce_async([mine, mine * 2], op=hvd.Sum, **options)

        def end() -> None:
            for found, factor in zip(hvd.synchronize(handle), (1, 2), strict=True):
                expect(found, total * factor, f"rank {rank}: {name}")

        return end


KINDS_OF_OPERATIONS = ("sum", "average", "max", "gather", "broadcast", "group")


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


def make_model() -> nn.Sequential:
    """The same on all ranks, whatever the generator of random numbers has given to others."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(torch.linspace(-1, 1, each.numel()).view(each.shape))
    return model


def batch(step: int, rank: int) -> Tensor:
    """What a rank trains with in a step."""
    return torch.linspace(-1, 1, 6).view(2, 3) * (1 + step) + rank


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    """The loss of a rank in a step."""
    loss: Tensor = model(batch(step, rank)).square().mean()
    return loss


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


@dataclass
class Elsewhere:
    """Programs of another file."""

    module: str
    name: str

    def draw(self, seed: int, size: int) -> Any:
        """Draw one."""
        return getattr(importlib.import_module(f"support.simulation.{self.module}"), self.name).draw(seed, size)


KINDS: dict[str, Any] = {
    "named": Named,
    "calls": Elsewhere("call_programs", "Calls"),
    "inline": Elsewhere("call_programs", "Inline"),
    "threads": Elsewhere("call_programs", "Threads"),
    "prompt": Elsewhere("prompt_programs", "Prompt"),
    "planned": Planned,
    "join": Uneven,
    "mistakes": Mistaken,
    "stuck": Stuck,
    "lost": Elsewhere("lost_programs", "Lost"),
    "elastic": Elsewhere("elastic_programs", "Elastic"),
    "rpc": Rpc,
    "leavers": Leavers,
    "autograd": Autograd,
    "torch": Torch,
    "training": Elsewhere("training_programs", "Training"),
    "fuzz": Elsewhere("fuzz_programs", "Fuzz"),
}
