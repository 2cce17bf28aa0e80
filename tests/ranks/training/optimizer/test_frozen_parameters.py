"""What the optimizer will step on is what is reduced, also where its parameter has been frozen or thawed meanwhile."""

from collections.abc import Callable, Mapping
from types import ModuleType

import pytest
import torch
from support.training.problem import largest_difference, loss_of, make_model, same_on_all_ranks, share, whole_batch
from torch import nn

import hvlike
from hvlike.errors import UsageError
from hvlike.training.distributed_optimizer import DistributedOptimizer


def accumulate(optimizer: torch.optim.Optimizer, backward: Callable[[], None], way: str) -> None:
    """A pass whose gradients stay sums of this rank."""
    if way == "no_sync" and isinstance(optimizer, DistributedOptimizer):
        with optimizer.no_sync():
            backward()
    else:
        backward()


def train(hvd: ModuleType, way: str, change: Callable[[int, nn.Module], None]) -> None:
    """Like one process, with `change` between the two passes of a step."""
    results = []
    for distributed in (False, True):
        model = make_model()
        plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        optimizer: torch.optim.Optimizer = plain
        if distributed:
            passes = 2 if way == "passes" else 1
            optimizer = DistributedOptimizer(plain, model.named_parameters(), backward_passes_per_step=passes)

        def backward(step: int, model: nn.Module = model, distributed: bool = distributed) -> None:
            batch = whole_batch(step)
            loss_of(model, share(hvd, batch) if distributed else batch).backward()

        for step in range(4):
            optimizer.zero_grad()
            accumulate(optimizer, lambda step=step: backward(10 + step), way)  # type: ignore[misc]
            change(step, model)
            backward(step)
            optimizer.step()
        results.append(list(model.parameters()))
    assert largest_difference(*results) < 1e-6
    assert same_on_all_ranks(results[1])


def freeze_a_layer(step: int, model: nn.Module) -> None:
    model[2].requires_grad_(step < 1)  # type: ignore[index, operator]


def freeze_in_turn(step: int, model: nn.Module) -> None:
    for number, layer in enumerate(model):  # type: ignore[arg-type]
        layer.requires_grad_(number != 2 * (step % 3))


def thaw(step: int, model: nn.Module) -> None:
    model[4].requires_grad_(step > 1)  # type: ignore[index, operator]


CHANGES = [freeze_a_layer, freeze_in_turn, thaw]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("way", ["no_sync", "passes"])
def test_between_the_passes_of_a_step(hvd: ModuleType, way: str, change: Callable[[int, nn.Module], None]) -> None:
    train(hvd, way, change)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("way", ["no_sync", "passes"])
def test_with_buckets_that_start_in_backward(
    hvd: ModuleType,
    restarted: Callable[[Mapping[str, str]], None],
    way: str,
    change: Callable[[int, nn.Module], None],
) -> None:
    restarted({"HVLIKE_OVERLAP": "1", "HVLIKE_BUCKET_BYTES": "256"})
    train(hvd, way, change)


def test_all_frozen_while_they_hold_sums_of_this_rank(hvd: ModuleType) -> None:
    model = make_model()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for step in range(2):
        with optimizer.no_sync():
            loss_of(model, share(hvd, whole_batch(step))).backward()
    model.requires_grad_(False)
    optimizer.step()
    assert same_on_all_ranks(model.parameters())


def test_a_gradient_set_by_hand_for_a_frozen_parameter(hvd: ModuleType) -> None:
    model = make_model()
    model[0].requires_grad_(False)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for step in range(3):
        optimizer.zero_grad()
        if step:
            model[0].bias.grad = torch.full((16,), float(hvd.rank()))
        loss_of(model, share(hvd, whole_batch(step))).backward()
        optimizer.step()
        assert model[0].weight.grad is None
        assert same_on_all_ranks(model.parameters())
    torch.testing.assert_close(model[0].bias.grad, torch.full((16,), sum(range(hvd.size())) / hvd.size()))


@pytest.mark.parametrize("settings", [{}, {"HVLIKE_OVERLAP": "1"}])
def test_one_set_too_late_is_refused(
    hvd: ModuleType, restarted: Callable[[Mapping[str, str]], None], settings: dict[str, str]
) -> None:
    restarted(settings)
    model = make_model()
    model[0].requires_grad_(False)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, share(hvd, whole_batch(step))).backward()
        if step == 2:
            model[0].bias.grad = torch.full((16,), float(hvd.rank()))
            with pytest.raises(UsageError, match=r"'0\.bias' were set after the first gradient .* had arrived"):
                optimizer.step()
            continue
        optimizer.step()
        assert same_on_all_ranks(model.parameters())


def test_a_layer_converted_between_two_steps(hvd: ModuleType) -> None:
    """Its hooks are gone, those of the others are not."""
    results = []
    for distributed in (False, True):
        model = make_model()
        model[4].register_forward_pre_hook(lambda layer, given: given[0].to(layer.weight.dtype))
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        if distributed:
            optimizer = DistributedOptimizer(optimizer, model.named_parameters())
        for step in range(4):
            optimizer.zero_grad()
            if step == 2:
                model[4].double()
            batch = whole_batch(step)
            loss_of(model, share(hvd, batch) if distributed else batch).backward()
            optimizer.step()
        results.append(list(model.parameters()))
    assert largest_difference(*results) < 1e-6
    assert same_on_all_ranks(each.float() for each in results[1])


@pytest.mark.mpi(min_size=2)
def test_adasum_with_gradients_that_come_in_the_closure(hvd: ModuleType) -> None:
    """Of a parameter that was frozen without one when step() began."""
    model = make_model()
    model[0].requires_grad_(False)
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), op=hvlike.Adasum
    )

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, share(hvd, whole_batch()))
        loss.backward()
        return loss

    optimizer.step(closure)
    assert same_on_all_ranks(model.parameters())

    def late() -> torch.Tensor:
        model[0].requires_grad_(True)
        return closure()

    with pytest.raises(UsageError, match=r"'0\.weight', '0\.bias'"):
        optimizer.step(late)
    optimizer.step(closure)


@pytest.mark.parametrize("op", [hvlike.Average, hvlike.Adasum])
def test_frozen_while_one_rank_alone_holds_sums(hvd: ModuleType, op: int) -> None:
    """The other ranks have not used the layer; afterwards it rests, untouched by weight decay."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "rare": nn.Linear(2, 2)})
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5), model.named_parameters(), op=op
    )
    start = model["rare"].weight.detach().clone()
    for step in range(4):
        optimizer.zero_grad()
        model.requires_grad_(True)
        if step == 1 and hvd.rank() == 0:
            with optimizer.no_sync():
                model["rare"](torch.ones(1, 2)).sum().backward()
        if step:
            model["rare"].requires_grad_(False)
        model["used"](torch.ones(1, 2)).sum().backward()
        before = model["rare"].weight.detach().clone()
        optimizer.step()
        assert same_on_all_ranks(model.parameters())
        assert torch.equal(before, model["rare"].weight) == (step != 1)
    assert not torch.equal(start, model["rare"].weight)
