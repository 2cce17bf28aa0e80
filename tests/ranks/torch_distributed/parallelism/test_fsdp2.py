"""torch's fully_shard: parameters as DTensors, over one dimension of ranks or in shards and copies of them."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.torch_distributed.problem import adam, assert_equal, batch_of, model_of, share, train, trained_alone
from support.training.problem import loss_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor


def sharded(model: nn.Module, **options: Any) -> FSDPModule:
    """Each layer is gathered for itself."""
    options.setdefault("mesh", init_device_mesh("cpu", (dist.get_world_size(),)))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


@pytest.mark.parametrize("reshard", [True, False])
def test_as_one_process(reshard: bool) -> None:
    model = sharded(model_of(), reshard_after_forward=reshard)
    train(model, adam(model.parameters()))
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert_equal(model, trained_alone(optimizer=adam))


def two_dimensional_mesh() -> DeviceMesh:
    size = dist.get_world_size()
    shards = 2 if size % 2 == 0 else 1
    return init_device_mesh("cpu", (size // shards, shards), mesh_dim_names=("copies", "shards"))


def test_in_shards_and_copies_of_shards() -> None:
    model = sharded(model_of(), mesh=two_dimensional_mesh())
    train(model, adam(model.parameters()))
    assert_equal(model, trained_alone(optimizer=adam))


def test_computes_in_16_bits_and_reduces_in_32() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(model_of().float(), mp_policy=policy)
    inputs, targets = (each.bfloat16() for each in share(batch_of(0)))
    loss_of(model, (inputs, targets)).backward()
    alone = model_of()
    loss_of(alone, batch_of(0)).backward()
    got = [parameter.grad.double() for parameter in model.parameters()]
    assert_equal(got, [parameter.grad for parameter in alone.parameters()], atol=0.02, rtol=0)


def test_gradients_of_several_passes_add_up() -> None:
    model = sharded(model_of())
    inputs, targets = share(batch_of(0))
    for part in range(3):
        model.set_requires_gradient_sync(part == 2)
        (loss_of(model, (inputs.chunk(3)[part], targets.chunk(3)[part])) / 3).backward()
    alone = model_of()
    loss_of(alone, batch_of(0)).backward()
    assert_equal([each.grad for each in model.parameters()], [each.grad for each in alone.parameters()])


def test_the_norm_of_all_gradients() -> None:
    model = sharded(model_of())
    loss_of(model, share(batch_of(0))).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    alone = model_of()
    loss_of(alone, batch_of(0)).backward()
    assert_equal([norm], [torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)])
    assert_equal([each.grad for each in model.parameters()], [each.grad for each in alone.parameters()])


def test_begins_without_memory() -> None:
    with torch.device("meta"):
        model = model_of()
    sharded(model)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.25)
    train(model, adam(model.parameters()))

    def filled() -> nn.Module:
        alone = model_of()
        for parameter in alone.parameters():
            nn.init.constant_(parameter, 0.25)
        return alone

    assert_equal(model, trained_alone(filled, adam))


def test_gathers_ahead_and_by_hand() -> None:
    model = sharded(model_of())
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    for layer, following in itertools.pairwise(layers):
        layer.set_modules_to_forward_prefetch([following])
    for previous, layer in itertools.pairwise(layers):
        layer.set_modules_to_backward_prefetch([previous])
    optimizer = adam(model.parameters())
    for step in range(3):
        handle = model.unshard(async_op=True)
        handle.wait()
        loss_of(model, share(batch_of(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_equal(model, trained_alone(optimizer=adam))


def test_recomputes_activations() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    model = model_of()
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.Linear))
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer)
    fully_shard(model)
    train(model, adam(model.parameters()))
    assert_equal(model, trained_alone(optimizer=adam))
