"""Compiled modules, SyncBatchNorm, gradient scaling, sparse gradients, overlap, process sets, no message in a step."""

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import pytest
import torch
from support.training.ddp_models import Branches, Shared, assert_same, gradients, inputs, share
from support.training.problem import same_on_all_ranks
from torch import Tensor, nn

from hvlike.collectives.session.context import current
from hvlike.nn import DistributedDataParallel
from hvlike.training.sync_batch_norm import convert_sync_batchnorm

LATE = {"waiting", "resumed"}
"""A rank that has waited for half a second says so: that is about time."""


def compare(hvd: ModuleType, network: nn.Module | Callable[..., Tensor], module: nn.Module, alone: nn.Module) -> None:
    for step in range(3):
        module.zero_grad()
        alone.zero_grad()
        network(share(hvd, inputs(step))).square().mean().backward()
        alone(inputs(step)).square().mean().backward()
        assert_same(gradients(module), gradients(alone))


@pytest.mark.filterwarnings("ignore")  # what torch.compile warns about its own doings
@pytest.mark.parametrize("around", [True, False], ids=["around", "inside"])
def test_compiled(hvd: ModuleType, around: bool) -> None:
    if hvd.size() > 2:
        pytest.skip("compiled on up to two ranks")
    module, alone = Shared(), Shared()
    if around:
        compare(hvd, torch.compile(DistributedDataParallel(module), backend="aot_eager"), module, alone)
    else:
        compiled: Any = torch.compile(module, backend="aot_eager")
        compare(hvd, DistributedDataParallel(compiled), module, alone)
    torch.compiler.reset()


def test_sync_batch_norm(hvd: ModuleType) -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))

    module, alone = make(), make()
    synchronised = convert_sync_batchnorm(module)
    compare(hvd, DistributedDataParallel(synchronised), synchronised, alone)
    assert_same([synchronised[1].running_mean], [alone[1].running_mean])


def test_a_plain_optimizer_with_a_scaler(hvd: ModuleType) -> None:
    """An infinity on one rank is one on all, so that all skip the step."""
    module = nn.Linear(4, 1)
    ddp = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=100)
    for step in range(3):
        optimizer.zero_grad()
        batch = share(hvd, inputs(step))
        if step == 1 and hvd.rank() == 0:
            batch = batch * torch.inf
        scaler.scale(ddp(batch).square().mean()).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 128.0
    assert same_on_all_ranks(module.parameters())


def test_sparse_gradients(hvd: ModuleType) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(7, 3, sparse=True), nn.Linear(3, 1))
    ddp = DistributedDataParallel(module, find_unused_parameters=True)
    for _ in range(2):
        ddp.zero_grad()
        ddp(torch.tensor([hvd.rank()])).sum().backward()
        assert module[0].weight.grad.is_sparse
        dense = module[0].weight.grad.to_dense()
        for row in range(7):
            expected = module[1].weight.detach()[0] / hvd.size() if row < hvd.size() else torch.zeros(3)
            torch.testing.assert_close(dense[row], expected)


def test_beside_backward(hvd: ModuleType, restarted: Callable[[Mapping[str, str]], None]) -> None:
    restarted({"HVLIKE_OVERLAP": "1", "HVLIKE_BUCKET_BYTES": "64"})
    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        module, alone = Shared(), Shared()
        compare(hvd, DistributedDataParallel(module, **options), module, alone)
        if options:
            branches = Branches()
            ddp = DistributedDataParallel(branches, **options)
            for _ in range(3):
                ddp.zero_grad()
                ddp(inputs(), "ab" if hvd.rank() == 0 else "a").sum().backward()
                assert branches.layers["c"].bias.grad is None
                assert same_on_all_ranks([branches.layers["b"].bias.grad])


@pytest.mark.mpi(min_size=2)
def test_no_message_but_the_data(hvd: ModuleType) -> None:
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), find_unused_parameters=True)
    for step in range(5):
        if step == 2:
            before = current().fabric.traffic.snapshot()
        ddp(share(hvd, inputs(step))).sum().backward()
    sent = current().fabric.traffic.snapshot() - before
    assert {kind: count for kind, count in sent.control.items() if kind not in LATE} == {}


def test_after_a_restart(hvd: ModuleType, restarted: Callable[[Mapping[str, str]], None]) -> None:
    module, alone = nn.Sequential(Shared(), nn.BatchNorm1d(4)).eval(), nn.Sequential(Shared(), nn.BatchNorm1d(4)).eval()
    ddp = DistributedDataParallel(module)
    compare(hvd, ddp, module, alone)
    restarted({})
    compare(hvd, ddp, module, alone)


@pytest.mark.mpi(min_size=3)
def test_of_some_ranks(hvd: ModuleType) -> None:
    some = hvd.ProcessSet([0, 2])
    hvd.shutdown()
    hvd.init(process_sets=[some])
    if hvd.rank() in (0, 2):
        for option in ("process_set", "process_group"):
            module, alone = Shared(), Shared()
            ddp = DistributedDataParallel(module, **{option: some})
            assert ddp.process_set is some
            ddp(inputs()[hvd.rank() // 2 :: 2]).square().mean().backward()
            alone(inputs()).square().mean().backward()
            assert_same(gradients(module), gradients(alone))
            with ddp.join(), torch.no_grad():
                for _ in range(1 + hvd.rank()):
                    with torch.enable_grad():
                        ddp(inputs()).square().mean().backward()
                    for parameter in module.parameters():
                        parameter += 1 + hvd.rank()
            # Those of rank 2, which has made all steps.
            torch.testing.assert_close(module.first.bias, alone.first.bias + 9)
    else:
        with pytest.raises(ValueError, match=r"this rank is not among the ranks \[0, 2\]"):
            DistributedDataParallel(Shared(), process_set=some)
    hvd.shutdown()
    hvd.init()
