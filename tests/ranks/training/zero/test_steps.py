"""A step does what the plain optimizer would do, with all its ways to be called, and all ranks have the result."""

from types import ModuleType
from typing import Any

import pytest
import torch
from support.training.problem import same_on_all_ranks
from support.training.zero_problem import average_gradients, batch, difference, loss_of, net
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import StepLR

from hvlike.errors import UsageError
from hvlike.optim import ZeroRedundancyOptimizer

VIEWS = pytest.mark.parametrize("view", [False, True])


class WithKeywords(SGD):
    """Its step wants something."""

    def step(self, closure: Any = None, kwarg: Any = None) -> Any:  # type: ignore[override]
        super().step()
        kwarg.append(5)


class WithExtraKey(SGD):
    """Its step leaves something in the groups."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        super().step()
        self.param_groups[0]["new_key"] = 0.1


class WithoutClosure(SGD):
    """Its step takes nothing."""

    def step(self) -> Any:  # type: ignore[override]
        return super().step()


def one() -> torch.Tensor:
    return torch.tensor([1.0], requires_grad=True)


def test_keywords_reach_the_plain_optimizer(hvd: ModuleType) -> None:
    x, said = one(), []
    optimizer = ZeroRedundancyOptimizer([x], WithKeywords, lr=0.1)
    x.backward()
    optimizer.step(0, kwarg=said)
    assert said == [5]
    torch.testing.assert_close(x.detach(), torch.tensor([0.9]))


def test_a_key_that_the_plain_optimizer_adds_shows(hvd: ModuleType) -> None:
    x = one()
    optimizer = ZeroRedundancyOptimizer([x], WithExtraKey, lr=0.1)
    x.backward()
    optimizer.step()
    assert optimizer.param_groups[0]["new_key"] == 0.1
    torch.testing.assert_close(x.detach(), torch.tensor([0.9]))


def test_a_step_that_takes_nothing(hvd: ModuleType) -> None:
    x = one()
    optimizer = ZeroRedundancyOptimizer([x], WithoutClosure, lr=0.1)
    x.backward()
    optimizer.step()
    torch.testing.assert_close(x.detach(), torch.tensor([0.9]))


def test_a_scheduler_sees_and_moves_the_options(hvd: ModuleType) -> None:
    x, y = one(), one()
    optimizer, plain = ZeroRedundancyOptimizer([x], SGD, lr=0.01), SGD([y], lr=0.01)
    schedulers = [StepLR(each, 1) for each in (optimizer, plain)]
    for _ in range(5):
        for each in (optimizer, plain):
            each.zero_grad()
        x.backward()
        y.backward()
        optimizer.step()
        plain.step()
        for scheduler in schedulers:
            scheduler.step()
        assert torch.equal(x, y)
    assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"]


def linear() -> torch.nn.Linear:
    model = torch.nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(2.0)
    return model


@VIEWS
@pytest.mark.parametrize("with_closure", [False, True])
def test_weight_and_bias_of_torchs_test(hvd: ModuleType, view: bool, with_closure: bool) -> None:
    """The gradients of all ranks are averaged by hand; then weight and bias have gone up by lr times their mean."""
    model, plain = linear(), linear()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, parameters_as_bucket_view=view, lr=0.1)
    reference = SGD(plain.parameters(), lr=0.1)
    x = torch.tensor([float(hvd.rank() + 1)])
    mean = torch.tensor([sum(range(1, hvd.size() + 1)) / hvd.size()])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).abs().sum()
        loss.backward()
        average_gradients(hvd, model)
        return loss

    if with_closure:
        assert optimizer.step(closure=closure).item() == hvd.rank() + 1 + 2.0
    else:
        closure()
        assert optimizer.step() is None
    plain(mean).abs().sum().backward()
    reference.step()
    assert difference(model, plain) < 1e-6
    assert torch.allclose(model.bias, torch.tensor([1.9]))
    assert same_on_all_ranks(model.parameters())


@VIEWS
@pytest.mark.parametrize("optimizer_class", [SGD, torch.optim.Adam, AdamW])
@pytest.mark.parametrize("maximize", [False, True])
def test_the_same_as_the_plain_optimizer_also_with_frozen_parameters(
    hvd: ModuleType, view: bool, optimizer_class: Any, maximize: bool
) -> None:
    model, plain = net(), net()
    keywords = {"lr": 0.01, "weight_decay": 0.01, "maximize": maximize}
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class, parameters_as_bucket_view=view, **keywords)
    reference = optimizer_class(plain.parameters(), **keywords)
    for step in range(6):
        for each, stepper in ((model, optimizer), (plain, reference)):
            first = next(each.parameters())
            first.requires_grad = step % 3 != 1
            stepper.zero_grad()
            loss_of(each, batch(step)).backward()
            stepper.step()
        assert difference(model, plain) == 0
    assert same_on_all_ranks(model.parameters())


@VIEWS
def test_groups_at_once_and_groups_added_later(hvd: ModuleType, view: bool) -> None:
    models = [net() for _ in range(3)]

    def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
        weights = [each for each in model.parameters() if each.dim() > 1]
        biases = [each for each in model.parameters() if each.dim() == 1]
        return [{"params": weights, "lr": 0.02}, {"params": biases, "weight_decay": 0.3}]

    at_once = ZeroRedundancyOptimizer(groups(models[0]), AdamW, parameters_as_bucket_view=view, lr=0.01)
    later = ZeroRedundancyOptimizer([groups(models[1])[0]], AdamW, parameters_as_bucket_view=view, lr=0.01)
    later.add_param_group(groups(models[1])[1])
    plain = AdamW(groups(models[2]), lr=0.01)
    for step in range(3):
        for model, optimizer in zip(models, (at_once, later, plain), strict=True):
            optimizer.zero_grad()
            loss_of(model, batch(step)).backward()
            optimizer.step()
        assert difference(models[0], models[2]) == difference(models[1], models[2]) == 0


def test_parameters_that_left_their_bucket_come_back(hvd: ModuleType) -> None:
    model, plain = net(), net()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, parameters_as_bucket_view=True, lr=0.1)
    reference = SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        for each, stepper in ((model, optimizer), (plain, reference)):
            stepper.zero_grad()
            loss_of(each, batch(step)).backward()
            stepper.step()
        assert difference(model, plain) == 0


@VIEWS
def test_parameters_that_are_not_stored_row_by_row(hvd: ModuleType, view: bool) -> None:
    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        convolution = torch.nn.Conv2d(32, 64, 3)
        convolution.weight.data = convolution.weight.data.contiguous(memory_format=torch.channels_last)
        return convolution

    ours, plain = model(), model()
    optimizer = ZeroRedundancyOptimizer(ours.parameters(), SGD, parameters_as_bucket_view=view, lr=0.1)
    reference = SGD(plain.parameters(), lr=0.1)
    images = torch.randn(2, 32, 8, 8, generator=torch.Generator().manual_seed(0))
    for each, stepper in ((ours, optimizer), (plain, reference)):
        loss_of(each, images).backward()
        stepper.step()
    assert difference(ours, plain) == 0
    assert same_on_all_ranks(each.contiguous() for each in ours.parameters())


def test_frozen_parameters_with_a_gradient_by_hand(hvd: ModuleType) -> None:
    params = [torch.zeros(size) for size in (4, 3, 2)]
    optimizer = ZeroRedundancyOptimizer(params, SGD, lr=1.0)
    params[1].grad = torch.ones(3)
    optimizer.step()
    assert [float(each.sum()) for each in params] == [0.0, -3.0, 0.0]


def share(hvd: ModuleType, inputs: Tensor) -> Tensor:
    """This rank's rows."""
    return inputs[hvd.rank() :: hvd.size()]


@pytest.mark.mpi(min_size=2)
def test_each_rank_keeps_the_gradients_of_its_share(hvd: ModuleType) -> None:
    model = net()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, reduce_gradients=True, lr=0.1)
    loss_of(model, batch(hvd.rank())).backward()
    optimizer.step()
    own = {parameter for group in optimizer.optim.param_groups for parameter in group["params"]}
    for parameter in model.parameters():
        assert (parameter.grad is not None) == (parameter in own)


def test_a_closure(hvd: ModuleType) -> None:
    ours, plain = net(), net()
    optimizer = ZeroRedundancyOptimizer(ours.parameters(), SGD, reduce_gradients=True, lr=0.1)
    reference = SGD(plain.parameters(), lr=0.1)

    def evaluate(model: nn.Module, stepper: torch.optim.Optimizer, inputs: Tensor) -> float:
        def closure() -> float:
            stepper.zero_grad()
            loss = loss_of(model, inputs)
            loss.backward()
            return loss.item()

        return stepper.step(closure)  # type: ignore[return-value]

    for step in range(2):
        mine = evaluate(ours, optimizer, share(hvd, batch(step)))
        whole = evaluate(plain, reference, batch(step))
        assert hvd.allreduce(torch.tensor(mine)).item() == pytest.approx(whole)
    assert difference(ours, plain) < 1e-6


def test_a_rank_without_a_gradient_counts_as_zeros(hvd: ModuleType) -> None:
    used, unused = torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)
    optimizer = ZeroRedundancyOptimizer([used, unused], SGD, reduce_gradients=True, lr=0.1, weight_decay=0.5)
    if hvd.rank() == 0:
        used.sum().backward()
    optimizer.step()
    torch.testing.assert_close(used.detach(), torch.full((3,), 1 - 0.1 * (1 / hvd.size() + 0.5)))
    # As with the plain optimizer.
    assert torch.equal(unused.detach(), torch.ones(2))


@pytest.mark.mpi(min_size=2)
def test_backward_between_clipping_and_step_is_refused(hvd: ModuleType) -> None:
    model = net()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, reduce_gradients=True, lr=0.1)
    loss_of(model, batch(0)).backward()
    hvd.clip_grad_norm_(optimizer, 1.0)
    loss_of(model, batch(0)).backward()
    with pytest.raises(UsageError, match="a backward pass ran after the gradients were reduced"):
        optimizer.step()
    optimizer.zero_grad()
    loss_of(model, batch(0)).backward()
    optimizer.step()
    assert same_on_all_ranks(model.parameters())


def test_clipping_is_for_the_owner_of_the_reduction(hvd: ModuleType) -> None:
    optimizer = ZeroRedundancyOptimizer(net().parameters(), SGD, lr=0.1)
    with pytest.raises(UsageError, match=r"use torch\.nn\.utils\.clip_grad_norm_"):
        hvd.clip_grad_norm_(optimizer, 1.0)
    optimizer = ZeroRedundancyOptimizer(net().parameters(), SGD, reduce_gradients=True, lr=0.1)
    with pytest.raises(UsageError, match="norm_type must be > 0"):
        hvd.clip_grad_norm_(optimizer, 1.0, 0)


def test_more_ranks_than_parameters(hvd: ModuleType) -> None:
    x = torch.ones(5, requires_grad=True)
    optimizer = ZeroRedundancyOptimizer([x], Adam, reduce_gradients=True, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale((x * (hvd.rank() + 1)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert same_on_all_ranks([x])
    torch.testing.assert_close(x.detach(), torch.full((5,), 0.8), rtol=1e-4, atol=1e-4)
