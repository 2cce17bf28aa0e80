"""torch's FullyShardedDataParallel, its first edition, on CPUs."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.torch_distributed.problem import adam, assert_equal, batch_of, model_of, share, train, trained_alone
from support.training.problem import loss_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

CPU = torch.device("cpu")
wrap = partial(FullyShardedDataParallel, device_id=CPU, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))


def full_parameters(model: nn.Module) -> list[torch.Tensor]:
    """What all ranks hold together."""
    with FullyShardedDataParallel.summon_full_params(model):
        return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_as_one_process(strategy: str) -> None:
    model = wrap(model_of(), sharding_strategy=ShardingStrategy[strategy], use_orig_params=True)
    train(model, adam(model.parameters()))
    assert_equal(full_parameters(model), trained_alone(optimizer=adam))


def test_in_shards_and_copies_of_shards() -> None:
    size = dist.get_world_size()
    # Without anything to shard it would not average over the copies either.
    shards = 2 if size % 2 == 0 else size
    mesh = init_device_mesh("cpu", (size // shards, shards))
    model = wrap(model_of(), device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD, use_orig_params=True)
    train(model, adam(model.parameters()))
    assert_equal(full_parameters(model), trained_alone(optimizer=adam))


def test_reductions_of_16_bits() -> None:
    policy = MixedPrecision(reduce_dtype=torch.bfloat16)
    model = wrap(model_of(), mixed_precision=policy, use_orig_params=True)
    train(model, adam(model.parameters()))
    assert_equal(full_parameters(model), trained_alone(optimizer=adam), atol=0.03, rtol=0)


def test_the_norm_of_all_gradients() -> None:
    model = wrap(model_of().float(), use_orig_params=True)
    inputs, targets = share(batch_of(0))
    loss_of(model, (inputs.float(), targets.float())).backward()
    norm: Any = model.clip_grad_norm_(0.1)
    alone = model_of()
    loss_of(alone, batch_of(0)).backward()
    expected = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
    torch.testing.assert_close(norm.double(), expected.double(), rtol=1e-5, atol=1e-6)


def test_no_sync_adds_up() -> None:
    model = wrap(model_of(), use_orig_params=True)
    optimizer = adam(model.parameters())
    inputs, targets = share(batch_of(0))
    with model.no_sync():
        (loss_of(model, (inputs[::2], targets[::2])) / 2).backward()
    (loss_of(model, (inputs[1::2], targets[1::2])) / 2).backward()
    optimizer.step()
    assert_equal(full_parameters(model), trained_alone(optimizer=adam, steps=[0]), atol=2e-2)


def test_model_and_optimizer_are_saved_and_loaded() -> None:
    first = wrap(model_of(), use_orig_params=True)
    optimizer = adam(first.parameters())
    train(first, optimizer, steps=range(2))
    second = wrap(model_of(7), use_orig_params=True)
    other = adam(second.parameters())
    with FullyShardedDataParallel.state_dict_type(first, StateDictType.SHARDED_STATE_DICT):
        saved, state = first.state_dict(), FullyShardedDataParallel.optim_state_dict(first, optimizer)
    with FullyShardedDataParallel.state_dict_type(second, StateDictType.SHARDED_STATE_DICT):
        second.load_state_dict(saved)
        other.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(second, other, state))
    train(second, other, steps=[2])
    assert_equal(full_parameters(second), trained_alone(optimizer=adam))
