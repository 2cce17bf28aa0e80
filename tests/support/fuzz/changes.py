"""What a program changes of its model and optimizer between two events of a training."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass

import torch
from support.fuzz.models import WIDTH, Half, Layer, Words
from support.fuzz.programs import Action
from support.fuzz.training import Training
from torch import nn


@dataclass(frozen=True)
class Freeze(Action):
    """Freeze a layer, or thaw it."""

    layer: int
    frozen: bool = True

    def do(self, training: Training) -> None:
        training.network.layer(self.layer).requires_grad_(not self.frozen)


@dataclass(frozen=True)
class FreezeAll(Action):
    """Freeze or thaw the whole model, as programs do with the critic of a GAN."""

    frozen: bool = True

    def do(self, training: Training) -> None:
        training.network.requires_grad_(not self.frozen)


@dataclass(frozen=True)
class Hook(Action):
    """Change the gradients of a layer by a hook, before or after they are accumulated."""

    layer: int
    after: bool = False

    def do(self, training: Training) -> None:
        for parameter in training.network.layer(self.layer).parameters():
            if not parameter.requires_grad:
                continue
            if self.after:
                parameter.register_post_accumulate_grad_hook(_halve)
            else:
                parameter.register_hook(lambda gradient: gradient * 0.5)


def _halve(parameter: torch.Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad.mul_(0.5)


@dataclass(frozen=True)
class Convert(Action):
    """Convert the model: parameters stay, their memory is another."""

    dtype: str

    def do(self, training: Training) -> None:
        training.network.to(getattr(torch, self.dtype))
        for part in training.network.parts:
            if isinstance(part, Half):
                part.set_grad_dtype()


@dataclass(frozen=True)
class Add(Action):
    """Add a layer to the model and its parameters to the optimizer."""

    def do(self, training: Training) -> None:
        layer = nn.Linear(WIDTH, WIDTH, dtype=training.network.last.weight.dtype)
        with torch.no_grad():
            layer.weight.copy_(torch.linspace(-0.3, 0.4, WIDTH * WIDTH).view(WIDTH, WIDTH))
            layer.bias.zero_()
        training.network.parts.append(Layer(layer))
        training.optimizer.add_param_group({"params": list(layer.parameters())})


@dataclass(frozen=True)
class Replace(Action):
    """Put a new parameter in the place of the last layer's bias, in the model and in the optimizer."""

    def do(self, training: Training) -> None:
        old = training.network.last.bias
        new = nn.Parameter(old.detach() + 0.25)
        training.network.last.bias = new
        for group in training.optimizer.param_groups:
            group["params"] = [new if each is old else each for each in group["params"]]
        training.optimizer.state.pop(old, None)


@dataclass(frozen=True)
class Resize(Action):
    """Give the table of an embedding one more row by its `data`."""

    part: int

    def do(self, training: Training) -> None:
        part = training.network.layer(self.part)
        assert isinstance(part, Words)
        table = part.table.weight
        table.grad = None
        table.data = torch.cat([table.data, table.data[:1] + 1])
        training.resized.add(table)


@dataclass(frozen=True)
class Resume(Action):
    """Load all state into new wrappers, among other ranks; the rest trains alone."""

    ranks: tuple[int, ...]

    def do(self, training: Training) -> None:
        training.network.zero_grad()
        training.world.resume(training, self.ranks)
        training.scheduler = None


@dataclass(frozen=True)
class Rewrap(Action):
    """Wrap the model anew, as programs do to resume; the earlier wrappers may still be there."""

    keep: bool = True

    def do(self, training: Training) -> None:
        if self.keep:
            training.earlier.append((training.model, training.optimizer))
        training.model, training.optimizer, training.scheduler = training.network, None, None
        training.world.rewrap(training)


@dataclass(frozen=True)
class Copy(Action):
    """Go on with a copy of model and optimizer."""

    pickled: bool = False

    def do(self, training: Training) -> None:
        before = training.model, training.network, training.optimizer
        after = pickle.loads(pickle.dumps(before)) if self.pickled else copy.deepcopy(before)
        training.model, training.network, training.optimizer = after
        training.scheduler = None


@dataclass(frozen=True)
class Reload(Action):
    """Load the state dicts of model and optimizer, as after a restart."""

    def do(self, training: Training) -> None:
        model, optimizer = copy.deepcopy((training.model.state_dict(), training.optimizer.state_dict()))
        training.model.load_state_dict(model)
        training.optimizer.load_state_dict(optimizer)
