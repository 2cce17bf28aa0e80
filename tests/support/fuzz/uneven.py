"""Ranks with different numbers of batches, in a Join context."""

from __future__ import annotations

from dataclasses import dataclass

from support.fuzz.programs import Action
from support.fuzz.training import Training


@dataclass(frozen=True)
class Uneven(Action):
    """Steps in a Join context: `counts` of them on each rank.

    by_active: averages are over the ranks that have inputs. compiled: by one function under torch.compile.
    """

    counts: tuple[int, ...]
    batch: int
    by_active: bool = False
    compiled: bool = False

    def do(self, training: Training) -> None:
        function = training.world.compiled(training.train) if self.compiled else training.train

        def step(number: int) -> None:
            function(*training.batch(self.batch + 100 * number))

        training.world.uneven(training, self.counts, step, by_active=self.by_active)
        training.optimizer.zero_grad()
        # Buffers but those of DistributedDataParallel, and the last gradients, stay each rank's own.
        training.see("join", gradients=False)
