"""Hooks fire once for each backward pass, wherever a model calls its layers, and keep nothing alive."""

import gc
import weakref
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from support.training.problem import largest_difference, loss_of, make_model, same_on_all_ranks, share, whole_batch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hvlike import DistributedOptimizer
from hvlike.training.gradients.grad_state import GradientHooks, Phase


class Listener:
    """Counts what it is told."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def hear(self, name: str) -> None:
        self.heard.append(name)


def test_a_hook_fires_once_for_each_pass_however_often_the_parameter_is_used() -> None:
    listener = Listener()
    hooks: GradientHooks[Listener, str] = GradientHooks(listener, Listener.hear)
    weight = nn.Parameter(torch.ones(2))
    hooks.attach(weight, "weight")
    gc.collect()
    for _ in range(2):
        (weight * weight + weight).sum().backward()
    assert listener.heard == ["weight", "weight"]


def test_attach_replaces_and_detach_removes() -> None:
    listener = Listener()
    hooks: GradientHooks[Listener, str] = GradientHooks(listener, Listener.hear)
    weight = nn.Parameter(torch.ones(2))
    hooks.attach(weight, "first")
    hooks.attach(weight, "second")
    weight.sum().backward()
    assert listener.heard == ["second"]
    assert weight in hooks
    hooks.detach(weight)
    weight.sum().backward()
    assert listener.heard == ["second"]
    assert len(hooks) == 0


def test_parameters_without_a_node_are_passed_over() -> None:
    listener = Listener()
    hooks: GradientHooks[Listener, str] = GradientHooks(listener, Listener.hear)
    hooks.attach(torch.ones(2), "no gradient")
    hooks.attach(nn.Parameter(torch.ones(2)) * 2, "no leaf")
    hooks.attach(nn.LazyLinear(2).weight, "lazy")
    assert len(hooks) == 0
    with torch.no_grad():
        hooks.attach(nn.Parameter(torch.ones(2)), "made under no_grad")
    assert len(hooks) == 1


def test_models_and_optimizers_are_freed(hvd: ModuleType) -> None:
    # A cycle through autograd's nodes would be out of the garbage collector's sight.
    seen = []
    for steps in (0, 2):
        model = make_model()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(model, share(hvd, whole_batch(step))).backward()
            optimizer.step()
        seen += [weakref.ref(each) for each in (model, optimizer, optimizer.wrapped, *model.parameters())]
        del model, optimizer
    gc.collect()
    assert [each() for each in seen] == [None] * len(seen)


def test_a_graph_that_outlives_the_optimizer_calls_nobody(hvd: ModuleType) -> None:
    model = make_model()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    loss = loss_of(model, share(hvd, whole_batch()))
    del optimizer
    gc.collect()
    loss.backward()
    second = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    second.step()


class Checkpointed(nn.Module):
    """Computes the first layers twice instead of keeping what they made."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = checkpoint(self.inner[:2], inputs, use_reentrant=False)
        return self.inner[2:](hidden)


KINDS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DataParallel": nn.DataParallel,
    "checkpointed": Checkpointed,
}


@pytest.mark.parametrize("kind", KINDS)
def test_models_that_call_their_layers_elsewhere(hvd: ModuleType, kind: str) -> None:
    expected = make_model()
    plain = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    model = KINDS[kind](make_model())
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), named_parameters=model.named_parameters()
    )
    for step in range(3):
        plain.zero_grad()
        loss_of(expected, whole_batch(step)).backward()
        plain.step()
        optimizer.zero_grad()
        loss_of(model, share(hvd, whole_batch(step))).backward()
        assert optimizer.gradients.phase is Phase.REDUCING
        optimizer.step()
    assert largest_difference(model.parameters(), expected.parameters()) < 1e-6
    assert same_on_all_ranks(model.parameters())


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_gradient_penalty(hvd: ModuleType) -> None:
    model = make_model()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(2):
        optimizer.zero_grad()
        inputs, targets = share(hvd, whole_batch(step))
        inputs.requires_grad_(True)
        loss = loss_of(model, (inputs, targets))
        (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
        (loss + slope.square().sum()).backward()
        optimizer.step()
    assert same_on_all_ranks(model.parameters())
    optimizer.zero_grad()
    loss_of(model, share(hvd, whole_batch())).backward(create_graph=True)
    optimizer.step()
    assert same_on_all_ranks(model.parameters())
    optimizer.zero_grad()
