"""The contestants of bench step: the same training step with a different communication, each on its own model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import hvlike
from hvlike.bench.bare import BARE, BareLoop
from hvlike.bench.devices import settle
from hvlike.bench.torch_group import GLOO
from hvlike.bench.workloads import Workload
from hvlike.nn import DistributedDataParallel

ALONE = "no communication"
OURS = "hvlike"
OURS_DDP = "hvlike DDP"

# Small enough that hundreds of steps on random data stay finite.
_LEARNING_RATE = 1e-4


class Trainer:
    """A model, its optimizer and a batch. A step is: zero_grad, forward, backward, optimizer.step()."""

    def __init__(self, name: str, workload: Workload, seed: int, rank: int) -> None:
        self.name = name
        self.device = torch.device(workload.device)
        self.model = workload.model(seed)
        self.batch = workload.data(seed + 1 + rank)
        self.network: Callable[..., Any] = self.model
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=_LEARNING_RATE)

    def step(self) -> None:
        """Train on the batch."""
        self.optimizer.zero_grad()
        self.network(*self.batch).backward()
        self.optimizer.step()

    def steps(self, count: int) -> None:
        """Train `count` times on the batch; a GPU is done with it then."""
        for _ in range(count):
            self.step()
        settle(self.device)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Of the model, in its order."""
        return list(self.model.parameters())

    def checksum(self) -> float:
        """A number that two replicas share when their weights are equal bit for bit."""
        return float(sum(each.detach().double().sum() for each in self.parameters))


def alone(workload: Workload, seed: int, rank: int) -> Trainer:
    """The floor: every rank trains by itself."""
    return Trainer(ALONE, workload, seed, rank)


def ours(workload: Workload, seed: int, rank: int) -> Trainer:
    """hvlike.DistributedOptimizer as users wrap it."""
    trainer = Trainer(OURS, workload, seed, rank)
    named = trainer.model.named_parameters()
    trainer.optimizer = hvlike.DistributedOptimizer(trainer.optimizer, named_parameters=named)
    return trainer


class _BareTrainer(Trainer):
    """Averages the gradients after backward by a bare loop."""

    def __init__(self, workload: Workload, seed: int, rank: int, bare: BareLoop) -> None:
        super().__init__(BARE, workload, seed, rank)
        self._bare = bare

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.network(*self.batch).backward()
        gradients = [each.grad.view(-1).numpy() for each in self.model.parameters() if each.grad is not None]
        self._bare.reduce(self._bare.chunks(gradients), 1 / hvlike.size())
        self.optimizer.step()


def barely(workload: Workload, seed: int, rank: int, bare: BareLoop) -> Trainer:
    """What a step costs with communication and nothing of a library."""
    return _BareTrainer(workload, seed, rank, bare)


def ours_ddp(workload: Workload, seed: int, rank: int) -> Trainer:
    """hvlike.nn.DistributedDataParallel with its defaults. Collective."""
    trainer = Trainer(OURS_DDP, workload, seed, rank)
    trainer.network = DistributedDataParallel(trainer.model)
    return trainer


def ddp(workload: Workload, seed: int, rank: int, *, view: bool, backend: str = GLOO) -> Trainer:
    """torch's DistributedDataParallel over the default process group, with its default buckets. Collective.

    view: with gradient_as_bucket_view. backend: of that group.
    """
    trainer = Trainer(f"DDP-{backend} view" if view else f"DDP-{backend}", workload, seed, rank)
    parallel: Any = torch.nn.parallel.DistributedDataParallel
    trainer.network = parallel(trainer.model, gradient_as_bucket_view=view)
    return trainer
