"""What a program does between passes: steps, gradients that are dropped, clipped, scaled, schedules."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from support.fuzz.passes import Pass
from support.fuzz.programs import Action
from support.fuzz.training import Training


@dataclass(frozen=True)
class ZeroGrad(Action):
    """Drop the gradients, by the optimizer or by the model."""

    set_to_none: bool = True
    by_model: bool = False

    def do(self, training: Training) -> None:
        (training.model if self.by_model else training.optimizer).zero_grad(set_to_none=self.set_to_none)


@dataclass(frozen=True)
class Step(Action):
    """Step the optimizer, by the GradScaler where the losses are scaled."""

    scaled: bool = False

    def do(self, training: Training) -> None:
        training.world.about_to_step(training)
        if self.scaled:
            training.scaler.step(training.world.for_scaler(training))
            training.scaler.update()
        else:
            training.optimizer.step()
        training.see("step", gradients=not self.scaled)


@dataclass(frozen=True)
class ClosureStep(Action):
    """Step with a closure that zeroes, runs forward and backward."""

    step: Pass

    def do(self, training: Training) -> None:
        def closure() -> torch.Tensor:
            training.optimizer.zero_grad()
            loss = self.step.loss(training, self.step.output(training))
            self.step.backward(training, loss)
            return loss

        training.optimizer.step(closure)
        training.see("step")


@dataclass(frozen=True)
class CompiledSteps(Action):
    """Some steps by one function under torch.compile."""

    batches: tuple[int, ...]
    set_to_none: bool = True

    def do(self, training: Training) -> None:
        function = training.world.compiled(training.train)
        for batch in self.batches:
            function(*training.batch(batch), self.set_to_none)
            training.see("compiled step")


@dataclass(frozen=True)
class Clip(Action):
    """Clip the gradients by their norm; with a GradScaler after unscaling."""

    norm: float = 0.1
    scaled: bool = False

    def do(self, training: Training) -> None:
        if self.scaled:
            training.scaler.unscale_(training.world.for_scaler(training))
        training.world.clip(training, self.norm)


@dataclass(frozen=True)
class Scaler(Action):
    """Make a GradScaler."""

    scale: float = 8.0

    def do(self, training: Training) -> None:
        training.scaler = torch.amp.GradScaler("cpu", init_scale=self.scale)


@dataclass(frozen=True)
class Schedule(Action):
    """Make a schedule of learning rates at the first time, and go on with it."""

    def do(self, training: Training) -> None:
        if training.scheduler is None:
            optimizer = training.world.for_scheduler(training)
            training.scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        training.scheduler.step()


@dataclass(frozen=True)
class Synchronize(Action):
    """optimizer.synchronize(), then a step without it."""

    scale: float = 1.0

    def do(self, training: Training) -> None:
        training.optimizer.synchronize()
        for parameter in training.network.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(self.scale)
        with training.optimizer.skip_synchronize():
            training.optimizer.step()
        training.see("step")


@dataclass(frozen=True)
class DropGradient(Action):
    """Set the gradients of a layer to None, as programs do that leave it out of a step."""

    layer: int

    def do(self, training: Training) -> None:
        for parameter in training.network.layer(self.layer).parameters():
            parameter.grad = None


@dataclass(frozen=True)
class DropPass(Action):
    """Drop the gradients of a pass whose reduction may have begun, as the pages say."""

    def do(self, training: Training) -> None:
        training.optimizer.synchronize()
        training.optimizer.zero_grad()
