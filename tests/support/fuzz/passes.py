"""Forward and backward passes: what a program does with a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from support.fuzz.programs import Action
from support.fuzz.training import Training
from torch import Tensor
from torch.nn.parameter import UninitializedParameter

EVERYWHERE = -1


@dataclass(frozen=True)
class Pass(Action):
    """Compute a loss and differentiate it, in one of several forms.

    unused: pairs (part, rank) of parts that a rank leaves out; EVERYWHERE for all ranks.
    local: inside no_sync(). scaled: by the GradScaler. spoilt: the rank whose loss is infinite.
    inside: pairs (layer, frozen) that forward itself sets first. absent: a rank that leaves out the whole pass.
    between: such pairs that are set between forward and backward.
    raiser: the rank on which the forms that raise do so; the others make a plain pass.
    caught: an error that the pages describe is caught, and the program goes on.
    """

    batch: int
    form: str = "plain"
    unused: tuple[tuple[int, int], ...] = ()
    local: bool = False
    scaled: bool = False
    spoilt: int | None = None
    inside: tuple[tuple[int, bool], ...] = ()
    absent: int | None = None
    raiser: int = EVERYWHERE
    between: tuple[tuple[int, bool], ...] = ()
    caught: bool = False

    def do(self, training: Training) -> None:
        if self.absent == training.world.rank:
            return
        form = FORMS["plain" if self.raiser not in (EVERYWHERE, training.world.rank) else self.form]
        with training.world.no_sync(training) if self.local else nullcontext():
            try:
                form(self, training)
            except Exception as error:
                if not self.caught:
                    raise
                training.see_error(error)

    def output(self, training: Training, shift: int = 0, rows: Tensor | None = None) -> Tensor:
        """Run the model on this rank's batch."""
        own, words = training.batch(self.batch + shift)
        rows = own if rows is None else rows
        skipped = {part for part, rank in self.unused if rank in (EVERYWHERE, training.world.rank)}
        handle = training.network.register_forward_pre_hook(lambda *_: self.set_frozen(training, self.inside))
        try:
            return training.model(rows.to(training.network.last.weight.dtype), words, skipped)
        finally:
            handle.remove()

    def set_frozen(self, training: Training, pairs: Sequence[tuple[int, bool]]) -> None:
        """Freeze and thaw layers."""
        for layer, frozen in pairs:
            training.network.layer(layer).requires_grad_(not frozen)

    def loss(self, training: Training, output: Tensor) -> Tensor:
        """Return the loss, scaled where the program scales."""
        loss = output.square().mean()
        if self.spoilt is not None and self.spoilt in (EVERYWHERE, training.world.rank):
            loss = loss * torch.inf
        return training.scaler.scale(loss) if self.scaled else loss

    def backward(self, training: Training, loss: Tensor) -> None:
        """Differentiate, where anything of the loss can be."""
        self.set_frozen(training, self.between)
        if loss.requires_grad:
            training.world.backward(training, loss, reduces=not self.local)


def _plain(step: Pass, training: Training) -> None:
    step.backward(training, step.loss(training, step.output(training)))


def _two_forwards(step: Pass, training: Training) -> None:
    first, second = step.output(training), step.output(training, 50)
    step.backward(training, step.loss(training, first) + step.loss(training, second))


def _two_backwards(step: Pass, training: Training) -> None:
    loss = step.loss(training, step.output(training))
    if loss.requires_grad:
        training.world.backward(training, loss, reduces=not step.local, retain_graph=True)
        training.world.backward(training, loss, reduces=not step.local)


def _create_graph(step: Pass, training: Training) -> None:
    loss = step.loss(training, step.output(training))
    if loss.requires_grad:
        training.world.backward(training, loss, reduces=not step.local, create_graph=True)
        for parameter in training.network.parameters():
            if parameter.grad is not None:
                # Else parameter and gradient hold each other for ever.
                parameter.grad.detach_()


def _penalty(step: Pass, training: Training) -> None:
    rows = training.batch(step.batch)[0].requires_grad_(True)
    loss = step.loss(training, step.output(training, rows=rows))
    if loss.requires_grad:
        (slope,) = torch.autograd.grad(loss, rows, create_graph=True)
        step.backward(training, loss + slope.square().sum())


def differentiable(training: Training) -> list[Tensor]:
    """Return the parameters that have a gradient to ask for."""
    return [
        each
        for each in training.network.parameters()
        if each.requires_grad and not isinstance(each, UninitializedParameter)
    ]


def _grad(step: Pass, training: Training) -> None:
    """Look at gradients without accumulating them."""
    loss = step.loss(training, step.output(training))
    if loss.requires_grad:
        torch.autograd.grad(loss, differentiable(training), allow_unused=True)


def _by_hand(step: Pass, training: Training) -> None:
    """Differentiate by torch.autograd.grad, exchange by hand, and set the gradients."""
    loss = step.loss(training, step.output(training))
    if not loss.requires_grad:
        return
    wanted = differentiable(training)
    found = torch.autograd.grad(loss, wanted, allow_unused=True)
    gradients = [torch.zeros_like(p) if g is None else g for p, g in zip(wanted, found, strict=True)]
    training.world.average(gradients)
    for parameter, gradient in zip(wanted, gradients, strict=True):
        parameter.grad = gradient.detach()


def _func(step: Pass, training: Training) -> None:
    """Differentiate by torch.func.grad; nothing is accumulated."""
    rows, words = training.batch(step.batch)
    rows = rows.to(training.network.last.weight.dtype)
    values = {name: each.detach() for name, each in training.model.named_parameters()}

    def loss_of(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(training.model, parameters, (rows, words)).square().mean()

    torch.func.grad(loss_of)(values)


def _forward(step: Pass, training: Training) -> None:
    """Forward alone, with gradients enabled: its graph is dropped."""
    step.output(training)


class Raised(Exception):
    """What a program raises in the middle of a step, and catches."""


def _raise_in_forward(step: Pass, training: Training) -> None:
    """The last layer raises on all ranks."""

    def fail(*_: object) -> None:
        raise Raised

    handle = training.network.last.register_forward_pre_hook(fail)
    try:
        step.output(training)
    except Raised:
        pass
    finally:
        handle.remove()


def _raise_in_backward(step: Pass, training: Training) -> None:
    """The gradient of the first layer's output raises on all ranks, when others have arrived."""

    def fail(_: Tensor) -> Tensor:
        raise Raised

    handle = training.network.first.register_forward_hook(
        lambda _module, _inputs, output: output.register_hook(fail) and None if output.requires_grad else None
    )
    try:
        _plain(step, training)
    except Raised:
        pass
    finally:
        handle.remove()


FORMS: dict[str, Callable[[Pass, Training], None]] = {
    "plain": _plain,
    "two forwards": _two_forwards,
    "two backwards": _two_backwards,
    "create graph": _create_graph,
    "penalty": _penalty,
    "grad": _grad,
    "by hand": _by_hand,
    "func": _func,
    "forward": _forward,
    "raise in forward": _raise_in_forward,
    "raise in backward": _raise_in_backward,
}


@dataclass(frozen=True)
class Evaluate(Action):
    """Run the model without gradients, on one rank or on all; `training`: without model.eval()."""

    batch: int
    rank: int = EVERYWHERE
    training: bool = False

    def do(self, training: Training) -> None:
        if self.rank not in (EVERYWHERE, training.world.rank):
            return
        training.model.train(self.training)
        with torch.no_grad():
            Pass(self.batch).output(training)
        training.model.train()
