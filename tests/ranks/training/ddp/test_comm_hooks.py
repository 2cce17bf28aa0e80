"""Communication hooks: those of hvlike.nn compress the planned reduction, others get buckets at the end of backward."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from support.training.ddp_models import Shared, assert_same, gradients, inputs, share
from support.training.problem import same_on_all_ranks
from torch import Tensor, nn

from hvlike.errors import DataParallelError, UsageError
from hvlike.nn import (
    DistributedDataParallel,
    GradBucket,
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)


def train(hvd: ModuleType, hook: Callable[..., Any] | None, state: Any = None, **options: Any) -> nn.Module:
    """The gradients of two steps."""
    module = Shared()
    ddp = DistributedDataParallel(module, **options)
    if hook is not None:
        ddp.register_comm_hook(state, hook)
    for step in range(2):
        ddp.zero_grad()
        ddp(share(hvd, inputs(step))).square().mean().backward()
    return module


def named(hvd: ModuleType, hook: str) -> Callable[[Any, GradBucket], Any]:
    """A hook that averages, in each of the ways in which it may answer."""

    def tensor(state: Any, bucket: GradBucket) -> Tensor:
        return hvd.allreduce(bucket.buffer(), name=f"bucket {bucket.index()}")

    def handle(state: Any, bucket: GradBucket) -> Any:
        return hvd.allreduce_async(bucket.buffer(), name=f"bucket {bucket.index()}")

    def future(state: Any, bucket: GradBucket) -> torch.futures.Future[Any]:
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result([tensor(state, bucket)])
        return done.then(lambda each: each.value()[0])

    def built_in(state: Any, bucket: GradBucket) -> Any:
        return allreduce_hook(state, bucket)

    def parts(state: Any, bucket: GradBucket) -> Tensor:
        for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
            assert gradient.shape == parameter.shape
            hvd.allreduce_(gradient, name="part")
        return bucket.buffer()

    return {each.__name__: each for each in (tensor, handle, future, built_in, parts)}[hook]


@pytest.mark.parametrize("hook", ["tensor", "handle", "future", "built_in", "parts"])
@pytest.mark.parametrize("bucket_cap_mb", [None, 5e-5], ids=["one bucket", "several"])
def test_a_hook_that_averages_changes_nothing(hvd: ModuleType, hook: str, bucket_cap_mb: float | None) -> None:
    ours = train(hvd, named(hvd, hook), bucket_cap_mb=bucket_cap_mb)
    assert_same(gradients(ours), gradients(train(hvd, None)))


def test_what_a_hook_is_given(hvd: ModuleType) -> None:
    seen: list[tuple[int, bool, int]] = []

    def noop(state: str, bucket: GradBucket) -> Tensor:
        assert state == "state"
        seen.append((bucket.index(), bucket.is_last(), len(bucket.parameters())))
        bucket.set_buffer(bucket.buffer() * 2)
        return bucket.buffer()

    module = train(hvd, noop, "state", bucket_cap_mb=5e-5)
    # Backwards: two biases of 16 bytes fit into 52, the weight of 64 is alone.
    assert seen == [(0, False, 2), (1, True, 1)] * 2
    # Nothing was exchanged.
    alone = Shared()
    alone(share(hvd, inputs(1))).square().mean().backward()
    assert_same([grad / 2 for grad in gradients(module) if grad is not None], gradients(alone))


@pytest.mark.parametrize(("hook", "tolerance"), [(fp16_compress_hook, 1e-3), (bf16_compress_hook, 1e-2)])
@pytest.mark.parametrize("wrapped", [False, True], ids=["planned", "called"])
def test_half_precision(
    hvd: ModuleType, hook: Callable[[Any, GradBucket], Any], tolerance: float, wrapped: bool
) -> None:
    ours = train(hvd, (lambda state, bucket: hook(state, bucket)) if wrapped else hook)
    exact = train(hvd, None)
    for one, other in zip(gradients(ours), gradients(exact), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * 1e-2)
    assert same_on_all_ranks(each for each in gradients(ours) if each is not None)
    if hvd.size() > 1:
        assert any(not torch.equal(a, b) for a, b in zip(gradients(ours), gradients(exact), strict=True))


def test_unused_parameters_under_a_hook(hvd: ModuleType) -> None:
    module = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)])

    def forward(x: Tensor) -> Tensor:
        return module[1](module[0](x)) if hvd.rank() == 0 else module[0](x)

    module.forward = forward
    ddp = DistributedDataParallel(module, find_unused_parameters=True)
    ddp.register_comm_hook(None, named(hvd, "tensor"))
    for _ in range(2):
        ddp.zero_grad()
        ddp(torch.ones(1, 2)).sum().backward()
        assert module[2].bias.grad is None
        torch.testing.assert_close(module[1].bias.grad, torch.full((2,), 1 / hvd.size()))


def test_sparse_gradients_under_a_hook(hvd: ModuleType) -> None:
    module = nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Linear(2, 1))
    ddp = DistributedDataParallel(module)
    ddp.register_comm_hook(None, lambda state, bucket: bucket.buffer())
    ddp(torch.tensor([1, 3])).sum().backward()
    assert module[0].weight.grad.is_sparse
    assert module[0].weight.grad.coalesce().indices().tolist() == [[1, 3]]


def test_misuse(hvd: ModuleType) -> None:
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(UsageError, match="Communication hook must be callable, got int"):
        ddp.register_comm_hook(None, 3)
    ddp.register_comm_hook(None, lambda state, bucket: None)
    with pytest.raises(DataParallelError, match="can only be called once"):
        ddp.register_comm_hook(None, allreduce_hook)
    with pytest.raises(UsageError, match=r"must return a tensor of 6 elements.*for bucket 0; got NoneType"):
        ddp(torch.ones(1, 2)).sum().backward()
