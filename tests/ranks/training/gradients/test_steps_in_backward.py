"""Hooks that step inside of backward are refused: gradients are reduced after them. Others may stay."""

import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from support.training.problem import largest_difference, loss_of, make_model, same_on_all_ranks, share, whole_batch
from support.training.ways import Wrapped
from torch import Tensor, nn

from hvlike.errors import UsageError

REASON = r"Gradients are reduced over the ranks after such hooks"


def apply(module: nn.Module) -> None:
    with warnings.catch_warnings():
        # Its package uses torch.jit.script.
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import _apply_optimizer_in_backward
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})


def step_and_forget(module: nn.Module, *, to_none: bool) -> None:
    """As in torch's tutorial on optimizer steps in backward."""
    for parameter in module.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)

        def hook(_: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)

        parameter.register_post_accumulate_grad_hook(hook)


def step_and_take(module: nn.Module) -> None:
    step_and_forget(module, to_none=True)


def step_and_zero(module: nn.Module) -> None:
    step_and_forget(module, to_none=False)


@pytest.mark.parametrize("way", ["optimizer", "adasum", "ddp", "find unused", "zero"])
def test_applied_before_it_is_wrapped(hvd: ModuleType, way: str) -> None:
    module = make_model()
    apply(module)
    with pytest.raises(UsageError, match=rf"_apply_optimizer_in_backward was applied to parameter .*{REASON}"):
        Wrapped(way, module)


@pytest.mark.parametrize("way", ["optimizer", "ddp", "find unused"])
def test_applied_after_it_was_wrapped(hvd: ModuleType, way: str) -> None:
    """Before anything has changed."""
    module, untouched = make_model(), make_model()
    wrapped = Wrapped(way, module)
    apply(module)
    with pytest.raises(UsageError, match=REASON):
        wrapped.step(hvd, 0)
    assert largest_difference(module.parameters(), untouched.parameters()) == 0


@pytest.mark.parametrize("steps", [None, 0, 3])
@pytest.mark.parametrize("register", [step_and_take, step_and_zero])
@pytest.mark.parametrize("way", ["optimizer", "ddp", "find unused"])
def test_hooks_that_step(hvd: ModuleType, way: str, register: Callable[[nn.Module], None], steps: int | None) -> None:
    """Before the model is wrapped, after it, and after some steps."""
    module = make_model()
    if steps is not None:
        wrapped = Wrapped(way, module)
        for step in range(steps):
            wrapped.step(hvd, step)
        register(module)
    else:
        register(module)
        wrapped = Wrapped(way, module)
    # An optimizer looks when the first gradient arrives, which may be too late for the first pass.
    passes = 2 if steps and way == "optimizer" else 1

    def train() -> None:
        for _ in range(passes):
            wrapped.step(hvd, 0)

    with pytest.raises(UsageError, match=rf"register_post_accumulate_grad_hook have changed parameter .*{REASON}"):
        train()


def test_hooks_that_step_under_adasum(hvd: ModuleType) -> None:
    module = make_model()
    step_and_take(module)
    wrapped = Wrapped("adasum", module)
    with pytest.raises(UsageError, match=REASON):
        wrapped.step(hvd, 0)


@pytest.mark.parametrize("way", ["optimizer", "ddp", "find unused"])
def test_in_a_pass_that_accumulates(hvd: ModuleType, way: str) -> None:
    module = make_model()
    step_and_take(module)
    wrapped = Wrapped(way, module)
    owner: Any = wrapped.optimizer if way == "optimizer" else wrapped.module

    def passes() -> None:
        with owner.no_sync():
            loss_of(wrapped.module, share(hvd, whole_batch())).backward()
        wrapped.step(hvd, 0)

    with pytest.raises(UsageError, match=REASON):
        passes()


def halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


@pytest.mark.parametrize("way", ["optimizer", "ddp", "find unused", "zero"])
def test_hooks_that_do_not_step_may_stay(hvd: ModuleType, way: str) -> None:
    """They read gradients or change them in place, before the reduction."""
    module, expected = make_model(), make_model()
    norms: list[float] = []
    for each in (module, expected):
        for parameter in each.parameters():
            parameter.register_post_accumulate_grad_hook(halve)
            parameter.register_post_accumulate_grad_hook(lambda parameter: norms.append(float(parameter.grad.norm())))
    wrapped = Wrapped(way, module)
    plain = torch.optim.SGD(expected.parameters(), lr=0.1)
    for number in range(3):
        wrapped.step(hvd, number)
        plain.zero_grad()
        loss_of(expected, whole_batch(number)).backward()
        plain.step()
    assert largest_difference(module.parameters(), expected.parameters()) < 1e-6
    assert same_on_all_ranks(module.parameters())
    assert norms


class NoGradient(torch.autograd.Function):
    """Says in backward that there is none."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(_: Any, *__: Tensor) -> None:
        return None


@pytest.mark.parametrize("way", ["optimizer", "find unused"])
def test_a_parameter_without_gradient_that_has_a_hook(hvd: ModuleType, way: str) -> None:
    module = make_model()
    module.register_parameter("rest", nn.Parameter(torch.ones(3)))
    module.rest.register_post_accumulate_grad_hook(lambda _: None)
    wrapped = Wrapped(way, module)
    for number in range(3):
        wrapped.optimizer.zero_grad()
        loss = loss_of(wrapped.module, share(hvd, whole_batch(number)))
        (loss + NoGradient.apply(module.rest).sum()).backward()
        wrapped.optimizer.step()
    assert same_on_all_ranks(module.parameters())
    assert torch.equal(module.rest, torch.ones(3))


@pytest.mark.parametrize("way", ["optimizer", "find unused"])
def test_frozen_between_forward_and_backward(hvd: ModuleType, way: str) -> None:
    """Nobody has taken its gradient: there is none."""
    wrapped = Wrapped(way, make_model())
    module = wrapped.module.module if way == "find unused" else wrapped.module
    layer = module.get_submodule("0")
    for parameter in layer.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: None)
    wrapped.step(hvd, 0)
    wrapped.optimizer.zero_grad()
    loss = loss_of(wrapped.module, share(hvd, whole_batch(1)))
    layer.requires_grad_(False)
    loss.backward()
    wrapped.optimizer.step()
    assert same_on_all_ranks(module.parameters())
    layer.requires_grad_(True)
    wrapped.step(hvd, 2)
    assert same_on_all_ranks(module.parameters())
