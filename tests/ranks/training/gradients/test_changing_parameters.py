"""Layers that are frozen, thawed or converted between two passes: gradients and parameters are those of one process."""

from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
from support.training.ddp_models import assert_same, gradients, inputs, share
from support.training.problem import same_on_all_ranks
from support.training.ways import Wrapped
from torch import Tensor, nn

from hvlike.nn import DistributedDataParallel

pytestmark = pytest.mark.differs_by_overlap

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


def freeze_in_turn(step: int, module: nn.Sequential) -> None:
    for number in range(0, 5, 2):
        module[number].requires_grad_(number != 2 * (step % 3))


def thaw(step: int, module: nn.Sequential) -> None:
    module[4].requires_grad_(step > 1)


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


def check(hvd: ModuleType, way: str, change: Change, when: str = "alone") -> None:
    """Train beside one process, with a change in each step.

    when: "alone": before its only pass; "before": before two, the first of which is local; "between": between these.
    """
    way, _, option = way.partition(", with ")
    module, alone = make(), make()
    change(0, module)
    change(0, alone)
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "foreach": False}
    given: dict[str, Any] = {"views": {"parameters_as_bucket_view": True}, "passes": {"backward_passes_per_step": 2}}
    wrapped = Wrapped(way, module, wrapper=given.get(option), **options)
    plain = torch.optim.SGD(alone.parameters(), **options)
    for step in range(5):
        wrapped.optimizer.zero_grad()
        plain.zero_grad()
        for number in (0, 1) if when != "alone" else (1,):
            if (number == 0) == (when == "before") or when == "alone":
                change(step, module)
                change(step, alone)
            batch = inputs(step if number else 50 + step)
            with wrapped.local() if number == 0 and option != "passes" else nullcontext():
                run(wrapped.module, module, share(hvd, batch)).backward()
            run(alone, alone, batch).backward()
        wrapped.optimizer.step()
        plain.step()
        if way != "zero":
            assert_same(gradients(module), gradients(alone))
        assert same_on_all_ranks(each.float() for each in module.parameters())
    assert_same(module.parameters(), alone.parameters())


WAYS = ["optimizer", "ddp", "find unused", "static graph", "hook", "zero", "zero, with views", "ddp, zero"]
WHILE_ACCUMULATING = [freeze_a_layer, freeze_in_turn, thaw]


@pytest.mark.in_turn(16)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("way", WAYS)
def test_between_two_steps(hvd: ModuleType, way: str, change: Change) -> None:
    check(hvd, way, change)


@pytest.mark.in_turn(6)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("way", ["optimizer", "ddp"])
def test_before_a_local_pass(hvd: ModuleType, way: str, change: Change) -> None:
    check(hvd, way, change, when="before")


@pytest.mark.in_turn(6)
@pytest.mark.parametrize("change", WHILE_ACCUMULATING)
@pytest.mark.parametrize("way", [*WAYS[:5], "optimizer, with passes"])
def test_between_the_passes_of_a_step(hvd: ModuleType, way: str, change: Change) -> None:
    """The optimizer will step on what a layer holds that was frozen meanwhile: it is reduced; then the layer rests."""
    check(hvd, way, change, when="between")


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


@pytest.mark.parametrize("way", ["ddp", "find unused"])
def test_frozen_while_one_rank_alone_holds_sums(hvd: ModuleType, way: str) -> None:
    module = nn.ModuleDict({"used": nn.Linear(4, 2), "rare": nn.Linear(4, 2)})
    module.forward = lambda x, name: module[name](x)  # type: ignore[method-assign]
    ddp = Wrapped(way, module).module
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


# -- where buckets start in backward, to the end of the file ----------------------------------------


@pytest.mark.in_turn(8)
@pytest.mark.usefixtures("beside_backward")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("way", ["optimizer", "ddp", "find unused"])
def test_between_two_steps_beside_backward(hvd: ModuleType, way: str, change: Change) -> None:
    check(hvd, way, change)


@pytest.mark.in_turn(3)
@pytest.mark.usefixtures("beside_backward")
@pytest.mark.parametrize("change", WHILE_ACCUMULATING)
@pytest.mark.parametrize("way", ["optimizer", "optimizer, with passes"])
def test_between_the_passes_of_a_step_beside_backward(hvd: ModuleType, way: str, change: Change) -> None:
    check(hvd, way, change, when="between")
