"""SyncBatchNorm in use: whole models, process sets, evaluation on one rank, repeated passes, copies, misuse."""

import contextlib
import copy
import pickle
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from support.training.problem import largest_difference, same_on_all_ranks, share, whole_batch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hvlike.errors import ShapeMismatchError, UsageError

pytestmark = pytest.mark.differs_by_ranks(2)


def make_model() -> nn.Sequential:
    """A model with two batch normalisations; the same weights on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 5, bias=False), nn.BatchNorm1d(5), nn.Linear(5, 3)
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[tuple[Tensor, Tensor]]) -> None:
    """One step on each batch."""
    for inputs, targets in batches:
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()


def test_a_model_with_a_distributed_optimizer_equals_one_process(hvd: ModuleType) -> None:
    reference = make_model()
    batches = [whole_batch(step) for step in range(4)]
    train(reference, torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9), batches)
    model = hvd.convert_sync_batchnorm(make_model())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    train(model, optimizer, [share(hvd, batch) for batch in batches])
    assert largest_difference(model.state_dict().values(), reference.state_dict().values()) < 1e-5
    assert same_on_all_ranks(model.state_dict().values())


@pytest.mark.parametrize("wrapped", ["module", "optimizer"])
def test_gradients_that_are_summed_up_are_not_taken_for_changed(hvd: ModuleType, wrapped: str) -> None:
    # Once, weight's and bias' gradients were two views of one tensor. Adding to one marked the other as changed.
    reference = make_model()
    batches = [whole_batch(step) for step in range(3)]
    for inputs, targets in batches:
        (reference(inputs) - targets).square().mean().backward()
    model = hvd.convert_sync_batchnorm(make_model())
    if wrapped == "module":
        outer, synchronize = hvd.nn.DistributedDataParallel(model), lambda: None
    else:
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), backward_passes_per_step=3)
        outer, synchronize = model, optimizer.synchronize
    for index, batch in enumerate(batches):
        inputs, targets = share(hvd, batch)
        with outer.no_sync() if wrapped == "module" and index < 2 else contextlib.nullcontext():
            (outer(inputs) - targets).square().mean().backward()
    synchronize()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert largest_difference(gradients, [parameter.grad for parameter in reference.parameters()]) < 1e-5


@pytest.fixture
def halves(hvd: ModuleType) -> Iterator[tuple[ModuleType, list[object]]]:
    """Even and odd ranks as process sets; back to a job without sets afterwards."""
    sets = [hvd.ProcessSet(range(start, hvd.size(), 2)) for start in (0, 1)]
    hvd.shutdown()
    hvd.init(process_sets=sets)
    yield hvd, sets
    hvd.shutdown()
    hvd.init()


@pytest.mark.mpi(min_size=3)
def test_process_sets_normalise_apart(halves: tuple[ModuleType, list[object]]) -> None:
    hvd, sets = halves
    mine, other = sets[hvd.rank() % 2], sets[1 - hvd.rank() % 2]
    layer = hvd.SyncBatchNorm(1, momentum=1.0, affine=False, process_set=mine)
    values = torch.tensor([[float(hvd.rank())], [10.0]])
    layer(values)
    whole = torch.tensor([*range(hvd.rank() % 2, hvd.size(), 2), *[10] * mine.size()], dtype=torch.float32)
    torch.testing.assert_close(layer.running_mean[0], whole.mean())
    torch.testing.assert_close(layer.running_var[0], whole.var())
    assert "process_set=ProcessSet" in repr(layer)
    assert copy.deepcopy(layer).process_set is mine
    assert pickle.loads(pickle.dumps(layer)).process_set is mine
    with pytest.raises(UsageError, match="is not a member of the provided process set"):
        hvd.SyncBatchNorm(1, process_set=other)(values)


def test_evaluation_is_local(hvd: ModuleType) -> None:
    tracking, local = hvd.SyncBatchNorm(2).eval(), hvd.SyncBatchNorm(2, track_running_stats=False).eval()
    if hvd.rank() == 0:
        # Nobody else is there: each of these would wait for ever if it communicated.
        inputs = torch.randn(4, 2)
        torch.testing.assert_close(tracking(inputs), inputs, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(local(inputs), nn.BatchNorm1d(2)(inputs))
    hvd.barrier()


def test_two_forward_passes_before_backward_and_recomputation(hvd: ModuleType) -> None:
    first, second = whole_batch(0)[0], whole_batch(1)[0]
    reference = make_model()
    (reference(first).square().sum() + reference(second).tanh().sum()).backward()
    for recompute in (False, True):
        model = hvd.convert_sync_batchnorm(make_model())
        outputs = [
            checkpoint(model, part, use_reentrant=False) if recompute else model(part)
            for part in (each[hvd.rank() :: hvd.size()] for each in (first, second))
        ]
        (outputs[0].square().sum() + outputs[1].tanh().sum()).backward()
        for own, whole in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(hvd.allreduce(own.grad, op=hvd.Sum), whole.grad, rtol=1e-4, atol=1e-4)


def test_a_copy_on_one_rank_disturbs_nobody(hvd: ModuleType) -> None:
    layer, later = hvd.SyncBatchNorm(2), hvd.SyncBatchNorm(2)
    inputs = torch.full((2, 2), float(hvd.rank()))
    layer(inputs)
    if hvd.rank() == 0:
        copy.deepcopy(layer).eval()(inputs)
        pickle.loads(pickle.dumps(hvd.SyncBatchNorm(3)))
    averages = [copy.deepcopy(layer), later]
    for each in averages:
        each(inputs)
    assert same_on_all_ranks([buffer for each in averages for buffer in each.buffers()])


def test_after_a_restart_of_hvlike(hvd: ModuleType) -> None:
    layer = hvd.SyncBatchNorm(1)
    layer(torch.zeros(2, 1))
    hvd.shutdown()
    with pytest.raises(ValueError, match=r"use hvd\.init\(\)"):
        layer(torch.zeros(2, 1))
    hvd.init()
    layer(torch.ones(2, 1))
    torch.testing.assert_close(layer.running_mean, torch.tensor([0.1]))


WRONG = {
    "one dimension": (torch.zeros(4), r"expected at least 2D input \(got 1D input\)"),
    "channels": (torch.zeros(4, 3), r"expected 2 channels in dimension 1 \(num_features\), got 3 in .* \[4, 3\]"),
    "integers": (torch.zeros(4, 2, dtype=torch.int64), "floating point numbers, got torch.int64"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_inputs_are_refused(hvd: ModuleType, what: str) -> None:
    inputs, text = WRONG[what]
    with pytest.raises(ValueError, match=text):
        hvd.SyncBatchNorm(2)(inputs)


def test_one_value_a_channel_over_all_ranks_is_refused_on_every_rank(hvd: ModuleType) -> None:
    layer = hvd.SyncBatchNorm(2)
    with pytest.raises(
        ValueError, match=r"Expected more than 1 value per channel when training.* size .* is \[[01], 2\]"
    ):
        layer(torch.zeros(1 if hvd.rank() == 0 else 0, 2))
    assert layer.num_batches_tracked == 0
    layer(torch.zeros(2, 2))


@pytest.mark.mpi(min_size=2)
def test_different_numbers_of_features_are_refused_on_every_rank(hvd: ModuleType) -> None:
    with pytest.raises(ShapeMismatchError, match="SyncBatchNorm"):
        hvd.SyncBatchNorm(2 + hvd.rank() % 2)(torch.zeros(2, 2 + hvd.rank() % 2))
    hvd.SyncBatchNorm(2)(torch.zeros(2, 2))


def test_a_second_derivative_is_refused(hvd: ModuleType) -> None:
    inputs = torch.randn(3, 2, requires_grad=True)
    output = hvd.SyncBatchNorm(2)(inputs).square().sum()
    with pytest.raises(UsageError, match=r"SyncBatchNorm\.\d+ has no second derivative"):
        torch.autograd.grad(output, inputs, create_graph=True)
