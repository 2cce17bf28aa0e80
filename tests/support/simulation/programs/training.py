"""Random programs that train by every wrapper: DistributedOptimizer in a process set and compressed, DDP, ZeRO.

In a step, some have local passes before, clip what was reduced, have another thread reduce something else meanwhile, or
begin and end a timeline. Some end in a Join context in which each rank has a number of inputs of its own.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from support.simulation.programs.parts import expect, loss_of, make_model
from torch import Tensor, nn

WRAPPERS = ("optimizer", "ddp", "zero", "ddp and zero")
RATE, MOMENTUM, LARGEST_NORM = 0.05, 0.5, 0.5
HALF = {"rtol": 1e-2, "atol": 1e-2}  # Where gradients travel as 16 bits


@dataclass(frozen=True)
class Step:
    """One step, as all ranks make it."""

    passes: int  # Local ones come before the last
    clips: bool
    beside: bool  # Another thread reduces named tensors
    timeline: str  # "": as before


@dataclass
class Training:
    """Steps of one wrapper, then perhaps a context with uneven numbers of inputs."""

    wrapper: str
    steps: list[Step]
    members: list[int]  # Of the process set that trains; the others only reduce something in the end
    compresses: bool
    views: bool  # Of ZeRO: parameters_as_bucket_view
    counts: list[int]  # In the Join context; empty: there is none

    @classmethod
    def draw(cls, seed: int, size: int) -> Training:
        """Draw one."""
        draw = random.Random(seed)
        wrapper = draw.choice(WRAPPERS)
        steps = [
            Step(draw.choice([1, 1, 2]), draw.random() < 0.3, draw.random() < 0.3, draw.choice(["", "", "on", "off"]))
            for _ in range(draw.randint(1, 4))
        ]
        members = list(range(size))
        if size > 1 and draw.random() < 0.4:
            members = sorted(draw.sample(members, draw.randint(1, size - 1)))
        counts = [draw.choice([0, 1, 3]) for _ in range(size)] if draw.random() < 0.5 else []
        compresses = wrapper == "optimizer" and draw.random() < 0.3
        return cls(wrapper, steps, members, compresses, draw.random() < 0.5, counts)

    def __call__(self, hvd: Any, rank: int) -> None:
        hvd.init()
        size, trains = hvd.size(), rank in self.members
        whole = len(self.members) == size
        members = hvd.global_process_set if whole else hvd.add_process_set(self.members)
        with tempfile.TemporaryDirectory() as folder:
            if trains:
                self.train(hvd, rank, members, Path(folder))
            total = hvd.allreduce(torch.full((3,), float(rank)), name="after it", op=hvd.Sum)
            expect(total, torch.full((3,), size * (size - 1) / 2), f"rank {rank}: after the training")
            hvd.shutdown()

    def train(self, hvd: Any, rank: int, members: Any, folder: Path) -> None:
        """What a member does."""
        from hvlike.join import Join

        model, optimizer, joinables = self.wrap(hvd, members)
        wanted = self.alone()
        for number, step in enumerate(self.steps):
            if step.timeline:
                hvd.stop_timeline()
            if step.timeline == "on":
                hvd.start_timeline(str(folder / f"{number}.json"))
            with self.beside(hvd, rank, members, number) if step.beside else contextlib.nullcontext():
                self.take(hvd, model, optimizer, step, number, rank)
            self.compare(model, next(wanted), f"rank {rank}: parameters after step {number} of {self.wrapper}")
        if self.counts:
            with Join(joinables):
                for number in range(self.counts[rank]):
                    self.take(hvd, model, optimizer, Step(1, False, False, ""), number, rank)
            everybody = hvd.allgather_object([each.tolist() for each in model.parameters()], process_set=members)
            assert all(each == everybody[0] for each in everybody), f"rank {rank}: the ranks have parted"
            self.compare(model, next(wanted), f"rank {rank}: parameters after the Join context of {self.wrapper}")

    def wrap(self, hvd: Any, members: Any) -> tuple[nn.Module, Any, list[Any]]:
        """The module to call, the optimizer, and what joins."""
        model: nn.Module = make_model()
        options = {"lr": RATE, "momentum": MOMENTUM}
        if self.wrapper == "optimizer":
            sgd = torch.optim.SGD(model.parameters(), **options)
            compression = hvd.Compression.fp16 if self.compresses else hvd.Compression.none
            optimizer = hvd.DistributedOptimizer(
                sgd, model.named_parameters(), compression=compression, process_set=members
            )
            return model, optimizer, [optimizer]
        if "ddp" in self.wrapper:
            model = hvd.nn.DistributedDataParallel(model, process_set=members)
        if "zero" in self.wrapper:
            optimizer = hvd.optim.ZeroRedundancyOptimizer(
                model.parameters(),
                torch.optim.SGD,
                process_set=members,
                parameters_as_bucket_view=self.views,
                reduce_gradients=self.wrapper == "zero",
                **options,
            )
        else:
            optimizer = torch.optim.SGD(model.parameters(), **options)
        return model, optimizer, [each for each in (model, optimizer) if hasattr(each, "join_hook")]

    def take(self, hvd: Any, model: Any, optimizer: Any, step: Step, number: int, rank: int) -> None:
        """One step."""
        optimizer.zero_grad()
        for _ in range(step.passes - 1):
            with getattr(optimizer if self.wrapper == "optimizer" else model, "no_sync", contextlib.nullcontext)():
                loss_of(model, number, rank).backward()  # type: ignore[no-untyped-call]
        loss_of(model, number, rank).backward()  # type: ignore[no-untyped-call]
        if self.wrapper == "zero" or not step.clips:
            # ZeRO reduces in its step: there is nothing to clip before.
            optimizer.step()
            return
        if self.wrapper == "optimizer":
            optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM)
        with optimizer.skip_synchronize() if self.wrapper == "optimizer" else contextlib.nullcontext():
            optimizer.step()

    @contextlib.contextmanager
    def beside(self, hvd: Any, rank: int, members: Any, number: int) -> Iterator[None]:
        """Another thread of each member reduces meanwhile."""
        from hvlike.system.system import system

        found: list[Tensor] = []

        def reduce() -> None:
            for each in range(2):
                mine = torch.full((each * 700 + 1,), float(rank))
                found.append(hvd.allreduce(mine, name=f"beside {number} {each}", op=hvd.Sum, process_set=members))

        thread = system.Thread(target=reduce, name="beside")
        thread.start()
        yield
        thread.join()
        for each, total in enumerate(found):
            expect(total, torch.full((each * 700 + 1,), float(sum(self.members))), f"rank {rank}: beside {number}")
        assert len(found) == 2, f"rank {rank}: the other thread has failed"

    def alone(self) -> Iterator[Sequence[Tensor]]:
        """The parameters after each step, and after the context, of one process that has the inputs of all members."""
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
        for number, step in enumerate(self.steps):
            optimizer.zero_grad()
            for rank in self.members:
                loss: Tensor = loss_of(model, number, rank) * step.passes / len(self.members)
                loss.backward()  # type: ignore[no-untyped-call]
            if step.clips and self.wrapper != "zero":
                nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM)
            optimizer.step()
            yield [each.detach().clone() for each in model.parameters()]
        for number in range(max((self.counts[rank] for rank in self.members), default=0) if self.counts else 0):
            optimizer.zero_grad()
            for rank in (each for each in self.members if number < self.counts[each]):
                loss = loss_of(model, number, rank) / len(self.members)
                loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        yield [each.detach().clone() for each in model.parameters()]

    def compare(self, model: nn.Module, wanted: Sequence[Tensor], what: str) -> None:
        """Check a rank's parameters."""
        for mine, theirs in zip(model.parameters(), wanted, strict=True):
            if self.compresses:
                assert torch.allclose(mine, theirs, **HALF), f"{what}: {mine}, expected {theirs}"
            else:
                expect(mine.detach(), theirs, what)
