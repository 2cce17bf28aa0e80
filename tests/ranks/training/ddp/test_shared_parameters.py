"""Parameters that several wrapped modules share are averaged in every pass, through one of them or through all."""

from collections.abc import Callable, Mapping
from types import ModuleType

import pytest
import torch
from support.training.ddp_models import assert_same, gradients, inputs, share
from support.training.problem import same_on_all_ranks
from torch import Tensor, nn

from hvlike.nn import DistributedDataParallel


class Part(nn.Module):
    """Begins with a layer that others begin with, too."""

    def __init__(self, shared: nn.Linear, seed: int) -> None:
        super().__init__()
        self.shared = shared
        torch.manual_seed(seed)
        self.own = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.shared(x).tanh())


def make() -> nn.ModuleList:
    torch.manual_seed(9)
    shared = nn.Linear(4, 4)
    return nn.ModuleList(Part(shared, seed) for seed in range(3))


SETTINGS = [{}, {"HVLIKE_OVERLAP": "1", "HVLIKE_BUCKET_BYTES": "64"}]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("find_unused", [False, True])
def test_passes_through_one_or_all(
    hvd: ModuleType, restarted: Callable[[Mapping[str, str]], None], find_unused: bool, settings: dict[str, str]
) -> None:
    restarted(settings)
    parts, alone = make(), make()
    wrapped = [DistributedDataParallel(part, find_unused_parameters=find_unused) for part in parts]
    for step in range(8):
        for each in (parts, alone):
            each.zero_grad()
        used = [(0, 1, 2), (1,), (2, 0), (0,)][step % 4]
        for models, batch in ((alone, inputs(step)), (wrapped, share(hvd, inputs(step)))):
            total = sum(models[number](batch).square().mean() for number in used)
            total.backward()
        assert_same(gradients(parts), gradients(alone))
        assert same_on_all_ranks(each for each in gradients(parts) if each is not None)


@pytest.mark.parametrize("settings", SETTINGS)
def test_one_module_behind_another(
    hvd: ModuleType, restarted: Callable[[Mapping[str, str]], None], settings: dict[str, str]
) -> None:
    restarted(settings)
    parts, alone = make(), make()
    first, second = (DistributedDataParallel(part) for part in parts[:2])
    for step in range(4):
        for each in (parts, alone):
            each.zero_grad()
        alone[1](alone[0](inputs(step))).square().mean().backward()
        second(first(share(hvd, inputs(step)))).square().mean().backward()
        assert_same(gradients(parts), gradients(alone))


def test_an_outer_module_around_a_wrapped_one(hvd: ModuleType) -> None:
    module, alone = make(), make()
    inner = DistributedDataParallel(module[0])
    outer = DistributedDataParallel(nn.Sequential(inner, module[1]))
    for step in range(3):
        for each in (module, alone):
            each.zero_grad()
        alone[1](alone[0](inputs(step))).square().mean().backward()
        outer(share(hvd, inputs(step))).square().mean().backward()
        assert_same(gradients(module), gradients(alone))
