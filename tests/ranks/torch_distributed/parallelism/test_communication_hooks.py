"""Hooks that reduce the gradients of DistributedDataParallel, torch's and hvlike's, in other ways: those of torch.

Imports of torch's hooks are in the tests: they take half a second, which every job would pay that collects this file.
"""

import pickle
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

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
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hvlike as hvd
from hvlike import checkpoint
from hvlike.elastic import TorchState
from hvlike.nn import DistributedDataParallel as OfHvlike
from hvlike.torch_distributed.calls import CallQueue

pytestmark = pytest.mark.differs_by_ranks(2)

Future = torch.futures.Future[Tensor]
Wrapper = Callable[..., Any]


@pytest.mark.parametrize(
    ("name", "atol"), [("allreduce_hook", 1e-10), ("fp16_compress_hook", 2e-3), ("fp16_compress_wrapper", 2e-3)]
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


def test_a_hook_of_hvlikes_may_wait_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its calls begin at once. Once they were held as in a backward, for a quarter of a second."""
    monkeypatch.setattr(CallQueue, "flush", lambda queue: None)

    def waiting(_: object, bucket: Any) -> Tensor:
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        end = time.monotonic() + 30
        while not future.done() and time.monotonic() < end:
            time.sleep(1e-3)
        assert future.done()
        return bucket.buffer() / dist.get_world_size()

    model = OfHvlike(model_of())
    model.register_comm_hook(None, waiting)
    train(model, sgd(model.parameters()))
    assert_equal(model, trained_alone())


# -- PowerSGD --------------------------------------------------------------------------------------------------


def power_sgd() -> Any:
    """The state of a hook that compresses from the third step on."""
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

    return PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5)


def wrap(
    model: nn.Module, state: Any, wrapper: Wrapper = OfHvlike, **options: Any
) -> tuple[Any, torch.optim.Optimizer]:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

    ddp = wrapper(model, **options)
    ddp.register_comm_hook(state, powerSGD_hook)
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.5)


def batch_32(step: int) -> tuple[Tensor, Tensor]:
    inputs, targets = batch_of(step)
    return inputs.float(), targets.float()


def train_32(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, share(batch_32(step % 2))).backward()
        optimizer.step()


def matrices(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None and parameter.dim() == 2]


@pytest.mark.parametrize(
    ("wrapper", "bucket_cap_mb"),
    # Under torch's each bucket calls on from the future of its last call: two buckets would do so in any order.
    [(DistributedDataParallel, None), (OfHvlike, None), (OfHvlike, 0.0005)],
    ids=["torch's", "hvlike's", "several buckets of hvlike's"],
)
def test_gradients_are_of_low_rank_and_the_loss_falls(wrapper: Wrapper, bucket_cap_mb: float | None) -> None:
    state = power_sgd()
    model, optimizer = wrap(make_model(0), state, wrapper, bucket_cap_mb=bucket_cap_mb)
    before = loss_of(model.module, batch_32(0)).item()
    train_32(model, optimizer, range(8))
    assert state.iter == 8
    # A small matrix may be sent whole.
    assert any(torch.linalg.matrix_rank(gradient, rtol=1e-4) == 1 for gradient in matrices(model))
    assert loss_of(model.module, batch_32(0)).item() < before
    assert same_on_all_ranks(model.parameters())
    assert same_on_all_ranks(matrices(model))


def test_powersgd_in_16_bits() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

    model = OfHvlike(make_model(0))
    model.register_comm_hook(power_sgd(), default_hooks.fp16_compress_wrapper(powerSGD_hook))
    train_32(model, torch.optim.SGD(model.parameters(), lr=0.1), range(2))
    assert same_on_all_ranks(model.parameters())


def test_powersgd_of_uneven_inputs() -> None:
    model, optimizer = wrap(make_model(0), power_sgd())
    for _ in range(2):
        with model.join():
            train_32(model, optimizer, range(2 + 2 * hvd.rank()))
        assert same_on_all_ranks(model.parameters())
    train_32(model, optimizer, range(2))
    assert same_on_all_ranks(matrices(model))


def test_a_commit_leaves_what_was_not_sent_to_the_hook() -> None:
    model, optimizer = wrap(make_model(0), power_sgd())
    state = TorchState(model=model, optimizer=optimizer)
    train_32(model, optimizer, range(4))
    state.commit()
    committed = deepcopy(model.module.state_dict())
    train_32(model, optimizer, range(4, 6))
    state.restore()
    assert all(torch.equal(value, committed[name]) for name, value in model.module.state_dict().items())
    train_32(model, optimizer, range(4, 8))
    assert same_on_all_ranks(model.parameters())


def test_a_run_goes_on_from_a_checkpoint_and_a_pickled_state(tmp_path: Path) -> None:
    folder = hvd.broadcast_object(tmp_path, name="folder")
    state = power_sgd()
    model, optimizer = wrap(make_model(0), state)
    train_32(model, optimizer, range(4))
    checkpoint.save(folder, 4, model=model, optimizer=optimizer)
    pickled = pickle.dumps(state)
    train_32(model, optimizer, range(4, 7))
    resumed, other = wrap(make_model(1), pickle.loads(pickled))
    checkpoint.load(folder, model=resumed, optimizer=other)
    train_32(resumed, other, range(4, 7))
    for one, another in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, another)
