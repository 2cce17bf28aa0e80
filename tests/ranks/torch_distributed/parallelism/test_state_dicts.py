"""torch.distributed.checkpoint of sharded models: saved by all ranks, loaded into other layouts."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.torch_distributed.problem import adam, assert_equal, model_of, train, trained_alone
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that all ranks see."""
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names)
    yield Path(names[0])
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(names[0])


def sharded(seed: int = 0) -> nn.Module:
    return fully_shard(model_of(seed), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def data_parallel(seed: int = 0) -> nn.Module:
    return DistributedDataParallel(model_of(seed))


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


@pytest.mark.parametrize(("before", "after"), [(sharded, sharded), (sharded, data_parallel), (data_parallel, sharded)])
def test_a_training_goes_on_from_a_checkpoint(before: Any, after: Any, folder: Path) -> None:
    model = before()
    optimizer = adam(model.parameters())
    train(model, optimizer, steps=range(2))
    dcp.save(states(model, optimizer), checkpoint_id=folder)
    other = after(seed=5)
    again = adam(other.parameters())
    loaded = states(other, again)
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(other, again, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    train(other, again, steps=[2])
    assert_equal(other, trained_alone(optimizer=adam))


def test_saved_beside_the_training(folder: Path) -> None:
    """async_save writes in a thread of its own, with collectives of a group that must be able to run beside."""
    model = sharded()
    optimizer = adam(model.parameters())
    state = {"model": get_model_state_dict(model)}
    saving = dcp.async_save(state, checkpoint_id=folder, process_group=dist.new_group())
    train(model, optimizer)
    saving.result()
    other = sharded(seed=5)
    state = {"model": get_model_state_dict(other)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(other, state["model"])
    assert_equal(other, model_of())


def test_the_whole_state_comes_together_and_goes_out_again() -> None:
    model = sharded()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = get_model_state_dict(model, options=options)
    assert list(whole) == (list(model_of().state_dict()) if dist.get_rank() == 0 else [])
    other = sharded(seed=5)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, whole if dist.get_rank() == 0 else {}, options=options)
    assert_equal(other, model_of())


def test_tensors_are_loaded_into_other_placements(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    value = torch.arange(7 * 5.0).view(7, 5)
    dcp.save({"value": distribute_tensor(value, mesh, [Shard(0)])}, checkpoint_id=folder)
    for placement in (Shard(1), Replicate()):
        state: dict[str, DTensor] = {"value": distribute_tensor(torch.zeros(7, 5), mesh, [placement])}
        dcp.load(state, checkpoint_id=folder)
        assert torch.equal(state["value"].full_tensor(), value)
