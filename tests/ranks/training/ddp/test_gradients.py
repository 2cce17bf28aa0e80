"""When backward() returns, gradients are the averages over the ranks: those of one process with the whole batch."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from support.training.ddp_models import Branches, Heads, Result, Shared, assert_same, gradients, inputs, share
from support.training.problem import same_on_all_ranks
from torch import Tensor, nn

from hvlike.nn import DistributedDataParallel

pytestmark = pytest.mark.differs_by_overlap


def loss_of(result: Tensor) -> Tensor:
    return result.square().mean()


def layers() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))


def test_ranks_start_from_the_first_one(hvd: ModuleType) -> None:
    torch.manual_seed(hvd.rank())
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    module[1].running_mean.fill_(hvd.rank() + 1)
    DistributedDataParallel(module)
    torch.manual_seed(0)
    assert torch.equal(module[0].weight, nn.Linear(4, 4).weight)
    assert module[1].running_mean[0] == 1


class Inside(nn.Module):
    """Makes two backward passes inside of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([layers(), layers()])
        self.announce: Callable[[Tensor], None] = lambda loss: None

    def forward(self, batch: Tensor) -> None:
        for part in self.parts:
            loss = loss_of(part(batch))
            self.announce(loss)
            loss.backward()


def test_losses_that_are_differentiated_inside_of_forward(hvd: ModuleType) -> None:
    module, alone = Inside(), Inside()
    ddp = DistributedDataParallel(module)
    module.announce = ddp.reduce_through
    for step in range(2):
        ddp.zero_grad()
        alone.zero_grad()
        ddp(share(hvd, inputs(step)))
        alone(inputs(step))
        assert_same(gradients(module), gradients(alone))


def test_what_counts_is_where_the_forward_was(hvd: ModuleType) -> None:
    module, alone = Shared(), Shared()
    ddp = DistributedDataParallel(module)
    with ddp.no_sync():
        result = ddp(share(hvd, inputs()))
    loss_of(result).backward()
    assert same_on_all_ranks(grad for grad in gradients(module) if grad is not None) == (hvd.size() == 1)
    # A synchronised forward, and the pass through both: the sum of all is reduced.
    ddp.zero_grad()
    with ddp.no_sync():
        first = ddp(share(hvd, inputs(1)))
    (loss_of(first) + loss_of(ddp(share(hvd, inputs(2))))).backward()
    (loss_of(alone(inputs(1))) + loss_of(alone(inputs(2)))).backward()
    assert_same(gradients(module), gradients(alone))


def test_a_module_used_outside_of_the_wrapper_is_local(hvd: ModuleType) -> None:
    module = Shared()
    ddp = DistributedDataParallel(module)
    loss_of(ddp(share(hvd, inputs()))).backward()
    if hvd.rank() == 0:
        # No other rank takes part in this.
        loss_of(ddp.module(inputs())).backward()


def test_a_graph_that_is_retained_is_reduced_each_time(hvd: ModuleType) -> None:
    module, alone = Shared(), Shared()
    ddp = DistributedDataParallel(module)
    for network, batch in ((ddp, share(hvd, inputs())), (alone, inputs())):
        loss = loss_of(network(batch))
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same(gradients(module), gradients(alone))


def test_two_forwards_before_one_backward(hvd: ModuleType) -> None:
    module, alone = Shared(), Shared()
    ddp = DistributedDataParallel(module)
    for network, batches in ((ddp, [share(hvd, inputs(step)) for step in range(2)]), (alone, [inputs(0), inputs(1)])):
        results = [network(batch) for batch in batches]
        (loss_of(results[0]) + loss_of(results[1])).backward()
    assert_same(gradients(module), gradients(alone))


def test_outputs_in_containers(hvd: ModuleType) -> None:
    module, alone = Heads(), Heads()
    ddp = DistributedDataParallel(module)

    def use(result: Result) -> Tensor:
        return loss_of(result.value) + loss_of(result.rest["more"][0])

    for step in range(2):
        use(ddp(share(hvd, inputs(step)))).backward()
        use(alone(inputs(step))).backward()
    assert_same(gradients(module), gradients(alone))


def test_several_backwards_after_one_forward(hvd: ModuleType) -> None:
    """Each reaches other parameters; together they have reached all, so the next forward has nothing to say."""
    module, alone = Heads(), Heads()
    ddp = DistributedDataParallel(module)
    for step in range(2):
        for network, batch in ((ddp, share(hvd, inputs(step))), (alone, inputs(step))):
            result = network(batch)
            loss_of(result.value).backward(retain_graph=True)
            loss_of(result.rest["more"][0]).backward()
    assert_same(gradients(module), gradients(alone))


def test_one_of_several_outputs_with_unused_parameters(hvd: ModuleType) -> None:
    module = Heads()
    ddp = DistributedDataParallel(module, find_unused_parameters=True)
    for _ in range(2):
        loss_of(ddp(share(hvd, inputs())).value).backward()
    assert module.second.weight.grad is None


def test_in_the_order_of_any_rank(hvd: ModuleType) -> None:
    module, alone = Branches(), Branches()
    ddp = DistributedDataParallel(module, bucket_cap_mb=1e-5)
    order = "abc" if hvd.rank() % 2 else "cab"
    for _ in range(3):
        ddp.zero_grad()
        loss_of(ddp(share(hvd, inputs()), order)).backward()
    for rank in range(hvd.size()):
        part = inputs()[rank :: hvd.size()]
        (loss_of(alone(part, "abc" if rank % 2 else "cab")) / hvd.size()).backward()
    assert_same(gradients(module), gradients(alone))


def test_several_modules_in_one_pass(hvd: ModuleType) -> None:
    """They are reduced in the order in which they were made, whichever the pass has come to first on a rank."""
    modules, alone = [Shared(), Heads(), Shared()], [Shared(), Heads(), Shared()]
    ddps = [DistributedDataParallel(module) for module in modules]

    def losses(networks: list[nn.Module], batch: Tensor, turn: int) -> Tensor:
        used = [*range(turn, 3), *range(turn)]
        parts = {place: networks[place](batch) for place in used}
        heads = parts[1]
        return loss_of(parts[0]) + loss_of(heads.value) + loss_of(heads.rest["more"][0]) + loss_of(parts[2])

    for step in range(2):
        losses(list(ddps), share(hvd, inputs(step)), hvd.rank() % 3).backward()
        losses(list(alone), inputs(step), 0).backward()
        for module, other in zip(modules, alone, strict=True):
            assert_same(gradients(module), gradients(other))


def test_an_error_of_one_module_does_not_keep_others_from_being_reduced(hvd: ModuleType) -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    ddps = [DistributedDataParallel(each) for each in (first, second)]
    ddps[0].register_comm_hook(None, lambda state, bucket: None)
    x = torch.full((1, 4), float(hvd.rank()))
    with pytest.raises(ValueError, match="must return a tensor"):
        (ddps[0](x).sum() + ddps[1](x).sum()).backward()
    torch.testing.assert_close(second.weight.grad, torch.full((4, 4), (hvd.size() - 1) / 2))
