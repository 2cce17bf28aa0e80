"""Layers that are frozen, thawed or converted between two passes: gradients are those of one process."""

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import pytest
import torch
from support.training.ddp_models import assert_same, gradients, inputs, share
from support.training.problem import same_on_all_ranks
from torch import Tensor, nn

from hvlike.nn import DistributedDataParallel

Change = Callable[[int, nn.Sequential], None]


def make() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def freeze_a_layer(step: int, module: nn.Sequential) -> None:
    module[4].requires_grad_(step != 1)


def freeze_the_first_layer(step: int, module: nn.Sequential) -> None:
    module[0].requires_grad_(step != 1)


def thaw_layer_by_layer(step: int, module: nn.Sequential) -> None:
    for number in range(0, 5, 2):
        module[number].requires_grad_(number >= 4 - 2 * step)


def train_in_turn(step: int, module: nn.Sequential) -> None:
    module[0].requires_grad_(step % 2 == 0)
    module[4].requires_grad_(step % 2 == 1)


def freeze_all(step: int, module: nn.Sequential) -> None:
    module.requires_grad_(step not in (1, 2))


def convert(step: int, module: nn.Sequential) -> None:
    if step == 1:
        module.double()


def convert_a_layer(step: int, module: nn.Sequential) -> None:
    if step == 1:
        module[4].double()


def replace_data(step: int, module: nn.Sequential) -> None:
    if step == 2:
        module[4].weight.data = module[4].weight.data.double().float()


CHANGES = [
    freeze_a_layer,
    freeze_the_first_layer,
    thaw_layer_by_layer,
    train_in_turn,
    freeze_all,
    convert,
    convert_a_layer,
    replace_data,
]


def run(model: nn.Module, module: nn.Sequential, batch: Tensor) -> Tensor:
    """A loss of any mixture of dtypes, also of a module that is frozen."""
    handles = [
        layer.register_forward_pre_hook(lambda layer, given: given[0].to(layer.weight.dtype))
        for layer in module
        if isinstance(layer, nn.Linear)
    ]
    loss = model(batch.clone().requires_grad_()).float().square().mean()
    for handle in handles:
        handle.remove()
    return loss


def average_hook(hvd: ModuleType) -> Callable[..., Any]:
    return lambda _, bucket: hvd.allreduce_async(bucket.buffer(), name=f"bucket {bucket.index()}")


WAYS = ["plain", "find_unused_parameters", "static_graph", "hook", "no_sync"]


def check(hvd: ModuleType, way: str, change: Change, steps: int = 4) -> None:
    module, alone = make(), make()
    change(0, module)
    options = {way: True} if way in ("find_unused_parameters", "static_graph") else {}
    ddp = DistributedDataParallel(module, **options)
    if way == "hook":
        ddp.register_comm_hook(None, average_hook(hvd))
    optimizers = [
        torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1) for each in (module, alone)
    ]
    for step in range(steps):
        for optimizer, each in zip(optimizers, (module, alone), strict=True):
            optimizer.zero_grad()
            change(step, each)
        if way == "no_sync":
            run(alone, alone, inputs(50 + step)).backward()
            with ddp.no_sync():
                run(ddp, module, share(hvd, inputs(50 + step))).backward()
        run(alone, alone, inputs(step)).backward()
        run(ddp, module, share(hvd, inputs(step))).backward()
        assert_same(gradients(module), gradients(alone))
        for optimizer in optimizers:
            optimizer.step()
        assert same_on_all_ranks(each.float() for each in module.parameters())
    assert_same(module.parameters(), alone.parameters())


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("way", WAYS)
def test_between_two_passes(hvd: ModuleType, way: str, change: Change) -> None:
    check(hvd, way, change)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("way", ["plain", "find_unused_parameters"])
def test_with_buckets_that_start_in_backward(
    hvd: ModuleType, restarted: Callable[[Mapping[str, str]], None], way: str, change: Change
) -> None:
    restarted({"HVLIKE_OVERLAP": "1", "HVLIKE_BUCKET_BYTES": "64"})
    check(hvd, way, change, steps=5)


class Toggling(nn.Module):
    """Decides in forward what it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make()
        self.step = -1

    def forward(self, x: Tensor) -> Tensor:
        train_in_turn(self.step, self.layers)
        return self.layers(x)


@pytest.mark.parametrize("find_unused", [False, True])
def test_inside_forward(hvd: ModuleType, find_unused: bool) -> None:
    module, alone = Toggling(), Toggling()
    ddp = DistributedDataParallel(module, find_unused_parameters=find_unused)
    for step in range(4):
        module.step = alone.step = step
        for each in (module, alone):
            each.zero_grad()
        alone(inputs(step)).square().mean().backward()
        ddp(share(hvd, inputs(step))).square().mean().backward()
        assert_same(gradients(module), gradients(alone))


class OwnLoss(nn.Module):
    """Differentiates inside of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make()

    def forward(self, x: Tensor) -> Tensor:
        loss = self.layers(x).square().mean()
        loss.backward()
        return loss.detach()


@pytest.mark.parametrize("change", [train_in_turn, thaw_layer_by_layer, convert])
def test_in_modules_that_differentiate_their_loss(hvd: ModuleType, change: Change) -> None:
    module, alone = OwnLoss(), OwnLoss()
    ddp = DistributedDataParallel(module)
    for step in range(3):
        for each in (module, alone):
            each.zero_grad()
            change(step, each.layers)
        batch = inputs(step).to(module.layers[0].weight.dtype)
        alone(batch)
        ddp(share(hvd, batch))
        assert_same(gradients(module), gradients(alone))


@pytest.mark.parametrize("frozen_in_forward", [False, True])
def test_a_critic_that_rests_while_the_maker_is_trained(hvd: ModuleType, frozen_in_forward: bool) -> None:
    """Frozen around the maker's forward alone, or around its whole pass; both are wrapped."""
    torch.manual_seed(0)
    pairs = [(nn.Linear(4, 4), nn.Linear(4, 1)) for _ in range(2)]
    pairs[1][0].load_state_dict(pairs[0][0].state_dict())
    pairs[1][1].load_state_dict(pairs[0][1].state_dict())
    for distributed, (maker, critic) in enumerate(pairs):
        make_up: nn.Module = DistributedDataParallel(maker) if distributed else maker
        judge: nn.Module = DistributedDataParallel(critic) if distributed else critic
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (maker, critic)]
        for step in range(4):
            batch, real = inputs(step), inputs(10 + step)
            if distributed:
                batch, real = share(hvd, batch), share(hvd, real)
            optimizers[1].zero_grad()
            (judge(real).square().mean() - judge(make_up(batch).detach()).square().mean()).backward()
            optimizers[1].step()
            critic.requires_grad_(False)
            optimizers[0].zero_grad()
            loss = judge(make_up(batch)).square().mean()
            if frozen_in_forward:
                critic.requires_grad_(True)
            loss.backward()
            critic.requires_grad_(True)
            optimizers[0].step()
    for mine, expected in zip(pairs[1], pairs[0], strict=True):
        assert_same(mine.parameters(), expected.parameters())


@pytest.mark.parametrize("way", ["plain", "find_unused_parameters", "static_graph", "hook"])
def test_a_layer_frozen_while_it_holds_sums_of_this_rank(hvd: ModuleType, way: str) -> None:
    """The optimizer will step on them, so they are reduced; afterwards the layer rests."""
    module, alone = make(), make()
    options = {way: True} if way in ("find_unused_parameters", "static_graph") else {}
    ddp = DistributedDataParallel(module, **options)
    if way == "hook":
        ddp.register_comm_hook(None, average_hook(hvd))
    for step in range(3):
        for each in (module, alone):
            each.zero_grad()
        if step < 2:
            run(alone, alone, inputs(50 + step)).backward()
            with ddp.no_sync():
                run(ddp, module, share(hvd, inputs(50 + step))).backward()
        if step == 1:
            module[2].requires_grad_(False)
            alone[2].requires_grad_(False)
        run(alone, alone, inputs(step)).backward()
        run(ddp, module, share(hvd, inputs(step))).backward()
        assert_same(gradients(module), gradients(alone))
        assert (module[2].weight.grad is None) == (step == 2)


def test_sums_of_a_thawed_layer_from_a_pass_beside_the_wrapper(hvd: ModuleType) -> None:
    """Nobody has seen them arrive, and the synchronised pass does not use the layer."""
    module = nn.ModuleDict({"used": nn.Linear(4, 2), "rest": nn.Linear(4, 2).requires_grad_(False)})
    module.forward = lambda x, name: module[name](x)  # type: ignore[method-assign]
    ddp = DistributedDataParallel(module, find_unused_parameters=True)
    ddp(share(hvd, inputs()), "used").sum().backward()
    module["rest"].requires_grad_(True)
    module(share(hvd, inputs()), "rest").sum().backward()
    ddp(share(hvd, inputs()), "used").sum().backward()
    assert same_on_all_ranks(gradients(module))


@pytest.mark.parametrize("way", ["plain", "find_unused_parameters"])
def test_frozen_while_one_rank_alone_holds_sums(hvd: ModuleType, way: str) -> None:
    module = nn.ModuleDict({"used": nn.Linear(4, 2), "rare": nn.Linear(4, 2)})
    module.forward = lambda x, name: module[name](x)  # type: ignore[method-assign]
    ddp = DistributedDataParallel(module, **({way: True} if way != "plain" else {}))
    if hvd.rank() == 0:
        with ddp.no_sync():
            ddp(inputs(), "rare").sum().backward()
    module["rare"].requires_grad_(False)
    for step in range(3):
        ddp(share(hvd, inputs(step)), "used").sum().backward()
        assert same_on_all_ranks(gradients(module))


@pytest.mark.parametrize("find_unused", [False, True])
def test_a_pass_on_one_rank_while_layers_rest(hvd: ModuleType, find_unused: bool) -> None:
    """It adds nothing to `.grad`; what that rank alone has seen does not change the plan of all."""
    module, alone = make(), make()
    ddp = DistributedDataParallel(module, find_unused_parameters=find_unused)
    for step in range(6):
        for each in (module, alone):
            each.zero_grad()
            freeze_all(3, each)
            thaw_layer_by_layer(step % 3, each)
        if hvd.rank() == 0:
            train_in_turn(step, module)
            trained = [each for each in module.parameters() if each.requires_grad]
            torch.autograd.grad(run(ddp, module, inputs()), trained)
            freeze_all(3, module)
            thaw_layer_by_layer(step % 3, module)
        run(alone, alone, inputs(step)).backward()
        run(ddp, module, share(hvd, inputs(step))).backward()
        assert_same(gradients(module), gradients(alone))
