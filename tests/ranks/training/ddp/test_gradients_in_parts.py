"""Gradients that come in several parts: of parameters that several wrapped modules share, and of checkpointed blocks.

Checkpoints are of both kinds, inside of the module and around it.
"""

from collections.abc import Callable, Mapping
from types import ModuleType

import pytest
import torch
from support.training.ddp_models import assert_same, gradients, inputs, share
from support.training.problem import same_on_all_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hvlike.errors import DataParallelError
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


class Checkpointed(nn.Module):
    """Two checkpointed blocks; `again` uses the first one twice."""

    def __init__(self, *, reentrant: bool, again: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.start = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.unused = nn.Linear(4, 4)
        self.unused.requires_grad_(False)
        self.reentrant = reentrant
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for block in [*self.blocks, *self.blocks[: int(self.again)]]:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def compare(hvd: ModuleType, ddp: nn.Module, module: nn.Module, alone: nn.Module) -> None:
    for step in range(3):
        module.zero_grad()
        alone.zero_grad()
        ddp(share(hvd, inputs(step))).square().mean().backward()
        alone(inputs(step)).square().mean().backward()
        assert_same(gradients(module), gradients(alone))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_of_blocks(hvd: ModuleType, reentrant: bool, options: dict[str, bool]) -> None:
    module, alone = Checkpointed(reentrant=reentrant), Checkpointed(reentrant=reentrant)
    if options:
        for each in (module, alone):
            each.unused.requires_grad_(True)
    compare(hvd, DistributedDataParallel(module, **options), module, alone)


@pytest.mark.parametrize(("reentrant", "static"), [(False, False), (False, True), (True, True)])
def test_of_a_block_that_is_used_twice(hvd: ModuleType, reentrant: bool, static: bool) -> None:
    module, alone = (Checkpointed(reentrant=reentrant, again=True) for _ in range(2))
    compare(hvd, DistributedDataParallel(module, static_graph=static), module, alone)


def test_gradients_that_come_twice_need_a_static_graph(hvd: ModuleType) -> None:
    module = Checkpointed(reentrant=True, again=True)
    ddp = DistributedDataParallel(module)
    for _ in range(2):
        ddp.zero_grad()
        with pytest.raises(
            DataParallelError, match=r"mark a variable ready only once.*'blocks\.0\.0\.\w+'.*static_graph=True"
        ):
            ddp(share(hvd, inputs())).sum().backward()
    module.again = False
    compare(hvd, ddp, module, Checkpointed(reentrant=True))


def test_a_graph_that_is_not_static(hvd: ModuleType) -> None:
    module = Checkpointed(reentrant=True)
    ddp = DistributedDataParallel(module, static_graph=True)
    ddp(share(hvd, inputs())).sum().backward()
    module.again = True
    with pytest.raises(DataParallelError, match=r"graph has changed in this iteration.*'blocks\.0\.0\.\w+'"):
        ddp(share(hvd, inputs())).sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_of_the_whole_module(hvd: ModuleType, reentrant: bool) -> None:
    module, alone = Checkpointed(reentrant=False), Checkpointed(reentrant=False)
    ddp = DistributedDataParallel(module)

    def around(network: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda x: checkpoint(network, x.requires_grad_(), use_reentrant=reentrant)

    for step in range(2):
        around(ddp)(share(hvd, inputs(step))).square().mean().backward()
        around(alone)(inputs(step)).square().mean().backward()
    assert_same(gradients(module), gradients(alone))
