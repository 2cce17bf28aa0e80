"""hook_with_zero_step: the step is made inside backward, and gives what DDP and a plain optimizer give."""

from types import ModuleType

import pytest
import torch
from support.training.problem import same_on_all_ranks
from support.training.zero_problem import batch, difference, loss_of, net
from torch.optim import SGD

from hvlike.errors import UsageError
from hvlike.nn import DistributedDataParallel, allreduce_hook, fp16_compress_hook
from hvlike.optim import ZeroRedundancyOptimizer, hook_with_zero_step, hook_with_zero_step_interleaved

pytestmark = pytest.mark.differs_by_overlap

INPUTS = 5
KEYWORDS = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.001}


@pytest.mark.parametrize("wrap", [hook_with_zero_step, hook_with_zero_step_interleaved])
@pytest.mark.parametrize(("static_graph", "shard_buckets"), [(False, False), (True, True)])
def test_parity_after_the_warm_up(hvd: ModuleType, wrap: object, static_graph: bool, shard_buckets: bool) -> None:
    model = net()
    # Buckets of a few KiB: several of them.
    ddp = DistributedDataParallel(model, static_graph=static_graph, bucket_cap_mb=0.05)
    zero = ZeroRedundancyOptimizer(
        ddp.parameters(), SGD, overlap_with_ddp=True, parameters_as_bucket_view=shard_buckets, **KEYWORDS
    )
    ddp.register_comm_hook(None, wrap(allreduce_hook, ddp, zero, shard_buckets=shard_buckets))  # type: ignore[operator]
    plain = net()
    reference = SGD(plain.parameters(), **KEYWORDS)
    for _ in range(2 + static_graph):
        ddp.zero_grad()
        loss_of(ddp, batch(0)).backward()
    assert difference(model, plain) == 0
    for step in range(INPUTS):
        ddp.zero_grad()
        loss_of(ddp, batch(step, 24)[hvd.rank() :: hvd.size()]).backward()
        reference.zero_grad()
        loss_of(plain, batch(step, 24)).backward()
        reference.step()
        # The gradients are there, too.
        for mine, whole in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, whole.grad, rtol=1e-4, atol=1e-6)
    assert difference(model, plain) < 1e-6
    assert same_on_all_ranks(model.parameters())


def test_without_warm_up_and_compressed(hvd: ModuleType) -> None:
    model, plain = net(), net()
    ddp = DistributedDataParallel(model)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), SGD, overlap_with_ddp=True, lr=0.1)
    ddp.register_comm_hook(None, hook_with_zero_step(fp16_compress_hook, ddp, zero, warm_up=0))
    reference = SGD(plain.parameters(), lr=0.1)
    loss_of(ddp, batch(0)).backward()
    loss_of(plain, batch(0)).backward()
    reference.step()
    assert 0 < difference(model, plain) < 1e-4 or hvd.size() == 1
    assert same_on_all_ranks(model.parameters())


def test_step_does_nothing(hvd: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    zero = ZeroRedundancyOptimizer(model.parameters(), SGD, overlap_with_ddp=True, lr=0.1)
    loss_of(model, batch(0)).backward()
    assert zero.step() is None
    assert difference(model, net()) == 0
    assert "`step()` should not be included in the training loop" in caplog.text


def test_what_is_refused(hvd: ModuleType) -> None:
    model = net()
    ddp = DistributedDataParallel(model)
    zero = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    with pytest.raises(UsageError, match="must be constructed with `overlap_with_ddp=True` to use this hook properly"):
        hook_with_zero_step(allreduce_hook, ddp, zero)
    zero = ZeroRedundancyOptimizer(model.parameters(), SGD, overlap_with_ddp=True, lr=0.1)
    with pytest.raises(RuntimeError, match="only supports a single parameter group"):
        zero.add_param_group({"params": [torch.ones(1)]})
