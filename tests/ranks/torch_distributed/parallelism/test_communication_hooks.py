"""Hooks that reduce the gradients of torch's DistributedDataParallel in other ways.

Imports of torch's hooks are in the tests: they take half a second, which every job would pay that collects this file.
"""

import pytest
import torch
import torch.distributed as dist
from support.torch_distributed.problem import (
    assert_equal,
    batch_of,
    halves,
    model_of,
    same_on_all_ranks,
    sgd,
    share,
    train,
    trained_alone,
)
from support.training.problem import loss_of, make_model
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

Future = torch.futures.Future[Tensor]


@pytest.mark.parametrize(
    ("name", "atol"),
    [
        ("allreduce_hook", 1e-10),
        ("fp16_compress_hook", 2e-3),
        ("fp16_compress_wrapper", 2e-3),
    ],
)
@pytest.mark.parametrize("as_view", [False, True])
def test_averages_in_full_and_in_16_bits(name: str, atol: float, as_view: bool) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    hook = getattr(default_hooks, name)
    if name.endswith("wrapper"):
        hook = hook(default_hooks.allreduce_hook)
    model = DistributedDataParallel(model_of(), gradient_as_bucket_view=as_view, bucket_cap_mb=0.001)
    model.register_comm_hook(None, hook)
    train(model, sgd(model.parameters()))
    assert_equal(model, trained_alone(), atol=atol, rtol=0)
    assert same_on_all_ranks(model.parameters())


def test_powersgd_lowers_the_loss_and_keeps_the_ranks_equal() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    model = DistributedDataParallel(make_model(0))
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=8, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    before = loss_of(model.module, batch_32(0)).item()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(8):
        optimizer.zero_grad()
        loss_of(model, share(batch_32(0))).backward()
        optimizer.step()
    assert loss_of(model.module, batch_32(0)).item() < before
    assert same_on_all_ranks(model.parameters())


def batch_32(step: int) -> tuple[Tensor, Tensor]:
    inputs, targets = batch_of(step)
    return inputs.float(), targets.float()


def test_a_chain_of_a_programs_own() -> None:
    """The results of one collective go into the next: what every rank has, summed in rank order."""

    def gather_and_sum(size: int, bucket: dist.GradBucket) -> Future:
        rows = [torch.empty_like(bucket.buffer()) for _ in range(size)]
        future = dist.all_gather(rows, bucket.buffer(), async_op=True).get_future()
        return future.then(lambda _: torch.stack(rows).sum(0) / size)

    model = DistributedDataParallel(model_of())
    model.register_comm_hook(dist.get_world_size(), gather_and_sum)
    train(model, sgd(model.parameters()))
    assert_equal(model, trained_alone())


def test_an_error_in_a_hook_is_raised_by_backward() -> None:
    def failing(_: object, bucket: dist.GradBucket) -> Future:
        def fail(_: Future) -> Tensor:
            raise ValueError("not today")

        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(fail)

    model = DistributedDataParallel(model_of())
    model.register_comm_hook(None, failing)
    with pytest.raises(RuntimeError, match="not today"):
        loss_of(model, share(batch_of(0))).backward()


def test_the_optimizer_runs_in_the_hook() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, optimizer_overlap_hooks
    from torch.distributed.optim.functional_sgd import _FunctionalSGD

    model = DistributedDataParallel(model_of())
    functional = _FunctionalSGD([], lr=0.1, momentum=0.9, _allow_empty_param_list=True)
    state = optimizer_overlap_hooks._OptimizerHookState(functional, list(model.parameters()))
    hook = optimizer_overlap_hooks._hook_then_optimizer(default_hooks.allreduce_hook, state)
    model.register_comm_hook(None, hook)
    for step in range(3):
        model.zero_grad()
        loss_of(model, share(batch_of(step))).backward()
    assert_equal(model, trained_alone())


@pytest.mark.mpi(min_size=2)
def test_local_sgd_averages_in_halves_and_now_and_then_over_all() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    with halves() as half:
        model = DistributedDataParallel(model_of())
        state = post_localSGD_hook.PostLocalSGDState(process_group=None, subgroup=half, start_localSGD_iter=2)
        model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
        averager = PeriodicModelAverager(period=4, warmup_steps=3)
        optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager)
        train(model, optimizer, steps=range(8))
    assert same_on_all_ranks(model.parameters())
