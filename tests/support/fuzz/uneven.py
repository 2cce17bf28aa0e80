"""Ranks with different numbers of batches, in a Join context."""

from __future__ import annotations

from dataclasses import dataclass, replace

from support.fuzz.passes import Pass
from support.fuzz.programs import Action
from support.fuzz.training import Training


@dataclass(frozen=True)
class Uneven(Action):
    """Steps in a Join context: `counts` of them on each rank; by_active: averages over the ranks that have inputs."""

    counts: tuple[int, ...]
    batch: int
    by_active: bool = False

    def do(self, training: Training) -> None:
        def step(number: int) -> None:
            training.optimizer.zero_grad()
            replace(Pass(self.batch), batch=self.batch + 100 * number).do(training)
            training.optimizer.step()

        training.world.uneven(training, self.counts, step, by_active=self.by_active)
        training.optimizer.zero_grad()
        # Buffers but those of DistributedDataParallel, and the last gradients, stay each rank's own.
        training.see("join", gradients=False)
