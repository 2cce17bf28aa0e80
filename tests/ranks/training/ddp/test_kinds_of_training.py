"""SyncBatchNorm, gradient scaling, sparse gradients, overlap, restarts, and modules that are frozen whole."""

import copy
import pickle
from collections.abc import Callable, Mapping
from types import ModuleType

import pytest
import torch
from support.training.ddp_models import Branches, Shared, assert_same, gradients, inputs, share
from support.training.problem import loss_of, make_model, same_on_all_ranks, whole_batch
from support.training.ways import Wrapped
from torch import Tensor, nn

from hvlike import convert_sync_batchnorm
from hvlike.elastic import TorchState
from hvlike.nn import DistributedDataParallel

pytestmark = pytest.mark.differs_by_ranks(2)


def compare(hvd: ModuleType, network: nn.Module | Callable[..., Tensor], module: nn.Module, alone: nn.Module) -> None:
    for step in range(3):
        module.zero_grad()
        alone.zero_grad()
        network(share(hvd, inputs(step))).square().mean().backward()
        alone(inputs(step)).square().mean().backward()
        assert_same(gradients(module), gradients(alone))


def test_sync_batch_norm(hvd: ModuleType) -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))

    module, alone = make(), make()
    synchronised = convert_sync_batchnorm(module)
    compare(hvd, DistributedDataParallel(synchronised), synchronised, alone)
    assert_same([synchronised[1].running_mean], [alone[1].running_mean])


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


def test_after_a_restart(hvd: ModuleType, restarted: Callable[[Mapping[str, str]], None]) -> None:
    module, alone = nn.Sequential(Shared(), nn.BatchNorm1d(4)).eval(), nn.Sequential(Shared(), nn.BatchNorm1d(4)).eval()
    ddp = DistributedDataParallel(module)
    compare(hvd, ddp, module, alone)
    restarted({})
    compare(hvd, ddp, module, alone)


def fail(gradient: torch.Tensor) -> None:
    """A hook that ends the pass."""
    raise ValueError("in the middle")


@pytest.mark.mpi(min_size=2)
def test_a_pass_that_was_interrupted_on_some_ranks_is_forgotten(hvd: ModuleType) -> None:
    wrapped = Wrapped("ddp", make_model())
    model = wrapped.module
    state = TorchState(model=model, optimizer=wrapped.optimizer)
    for step in range(4):
        wrapped.step(hvd, step)
    state.commit()
    for step in range(4, 7):
        wrapped.step(hvd, step)
    expected = [parameter.detach().clone() for parameter in model.parameters()]
    if hvd.rank() == 0:
        loss = loss_of(model, whole_batch(9))
        hook = next(model.parameters()).register_hook(fail)
        with pytest.raises(ValueError, match="in the middle"):
            loss.backward()
        hook.remove()
    hvd.shutdown()
    hvd.init()
    state.restore()
    state.reset()
    state.sync()
    for step in range(4, 7):
        wrapped.step(hvd, step)
    assert same_on_all_ranks(model.parameters())
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), expected, strict=True))


def test_it_is_copied_and_pickled(hvd: ModuleType) -> None:
    model = DistributedDataParallel(make_model())
    model.requires_grad_(False)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        again.requires_grad_(True)
        again(share(hvd, whole_batch()[0])).square().mean().backward()
        assert same_on_all_ranks([each.grad for each in again.parameters() if each.grad is not None])


@pytest.mark.parametrize("hooked", [False, True])
def test_it_leaves_a_join_context(hvd: ModuleType, hooked: bool) -> None:
    model = DistributedDataParallel(make_model())
    if hooked:
        model.register_comm_hook(None, lambda _, bucket: hvd.allreduce_async(bucket.buffer(), name="bucket"))
    model.requires_grad_(False)
    with model.join(), torch.enable_grad():
        for step in range(hvd.rank()):
            model(share(hvd, whole_batch(step)[0]))
    assert same_on_all_ranks(model.parameters())


@pytest.mark.mpi(min_size=2)
def test_after_a_join_context_that_some_ranks_took_no_part_in(hvd: ModuleType) -> None:
    """Sums from before the context make no rank reduce alone."""
    model = DistributedDataParallel(make_model(), find_unused_parameters=True)
    inputs = share(hvd, whole_batch()[0])
    with model.no_sync():
        model(inputs).square().mean().backward()
    with model.join():
        if hvd.rank() == 0:
            model.zero_grad()
            model(inputs).square().mean().backward()
    model.zero_grad()
    model.requires_grad_(False)
    model(inputs.clone().requires_grad_(True)).square().mean().backward()
    assert all(each.grad is None for each in model.parameters())
    model.requires_grad_(True)
    model(inputs).square().mean().backward()
    assert same_on_all_ranks([each.grad for each in model.parameters() if each.grad is not None])
