"""torch's classes that share out parameters or the state of an optimizer, and checkpoints of them in any layout.

FullyShardedDataParallel and fully_shard, the two editions of FSDP, on CPUs; ZeroRedundancyOptimizer, whose import takes
half a second, which every job would pay that collects this file; torch.distributed.checkpoint.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.torch_distributed.problem import (
    adam,
    assert_equal,
    batch_of,
    halves,
    model_of,
    same_on_all_ranks,
    share,
    train,
    trained_alone,
)
from support.training.problem import loss_of
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.differs_by_ranks(2)

CPU = torch.device("cpu")
wrap = partial(
    FullyShardedDataParallel, device_id=CPU, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=True
)


def first_edition(model: nn.Module, strategy: str = "FULL_SHARD") -> nn.Module:
    return wrap(model, sharding_strategy=ShardingStrategy[strategy])


def in_copies(model: nn.Module) -> nn.Module:
    size = dist.get_world_size()
    # Without anything to shard it would not average over the copies either.
    shards = 2 if size % 2 == 0 else size
    mesh = init_device_mesh("cpu", (size // shards, shards))
    return wrap(model, device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    """Each layer is gathered for itself."""
    options.setdefault("mesh", init_device_mesh("cpu", (dist.get_world_size(),)))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


def sharded_in_copies(model: nn.Module) -> nn.Module:
    size = dist.get_world_size()
    shards = 2 if size % 2 == 0 else 1
    return sharded(model, mesh=init_device_mesh("cpu", (size // shards, shards), mesh_dim_names=("copies", "shards")))


def full_parameters(model: nn.Module) -> list[Tensor]:
    """What all ranks hold together."""
    if not isinstance(model, FullyShardedDataParallel):
        return list(model.parameters())
    with FullyShardedDataParallel.summon_full_params(model):
        return [parameter.detach().clone() for parameter in model.parameters()]


FSDP: dict[str, Callable[[nn.Module], nn.Module]] = {
    "first edition": first_edition,
    "first edition, gathered once": partial(first_edition, strategy="SHARD_GRAD_OP"),
    "first edition, copies of shards": in_copies,
    "second edition": sharded,
    "second edition, gathered once": partial(sharded, reshard_after_forward=False),
    "second edition, copies of shards": sharded_in_copies,
}


@pytest.mark.parametrize("kind", FSDP)
def test_as_one_process(kind: str) -> None:
    model = FSDP[kind](model_of())
    train(model, adam(model.parameters()))
    assert_equal(full_parameters(model), trained_alone(optimizer=adam))


def test_computes_in_16_bits_and_reduces_in_32() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(model_of().float(), mp_policy=policy)
    inputs, targets = (each.bfloat16() for each in share(batch_of(0)))
    loss_of(model, (inputs, targets)).backward()
    alone = model_of()
    loss_of(alone, batch_of(0)).backward()
    got = [parameter.grad.double() for parameter in model.parameters()]
    assert_equal(got, [parameter.grad for parameter in alone.parameters()], atol=0.02, rtol=0)


@pytest.mark.parametrize("edition", ["first edition", "second edition"])
def test_the_norm_of_all_gradients(edition: str) -> None:
    model = FSDP[edition](model_of().float())
    inputs, targets = share(batch_of(0))
    loss_of(model, (inputs.float(), targets.float())).backward()
    clip = getattr(model, "clip_grad_norm_", None) or partial(torch.nn.utils.clip_grad_norm_, model.parameters())
    alone = model_of()
    loss_of(alone, batch_of(0)).backward()
    expected = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
    assert_equal([clip(0.1).double()], [expected.double()], rtol=1e-5, atol=1e-6)


def test_gradients_of_several_passes_add_up() -> None:
    model = sharded(model_of())
    inputs, targets = share(batch_of(0))
    for part in range(3):
        model.set_requires_gradient_sync(part == 2)
        (loss_of(model, (inputs.chunk(3)[part], targets.chunk(3)[part])) / 3).backward()
    alone = model_of()
    loss_of(alone, batch_of(0)).backward()
    assert_equal([each.grad for each in model.parameters()], [each.grad for each in alone.parameters()])


def test_the_first_edition_is_saved_and_loaded() -> None:
    first, second = first_edition(model_of()), first_edition(model_of(7))
    optimizer, other = adam(first.parameters()), adam(second.parameters())
    train(first, optimizer, steps=range(2))
    with FullyShardedDataParallel.state_dict_type(first, StateDictType.SHARDED_STATE_DICT):
        saved, state = first.state_dict(), FullyShardedDataParallel.optim_state_dict(first, optimizer)
    with FullyShardedDataParallel.state_dict_type(second, StateDictType.SHARDED_STATE_DICT):
        second.load_state_dict(saved)
        other.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(second, other, state))
    train(second, other, steps=[2])
    assert_equal(full_parameters(second), trained_alone(optimizer=adam))


# -- torch.distributed.checkpoint ----------------------------------------------------------------------------


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that all ranks see."""
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names)
    yield Path(names[0])
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(names[0])


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


@pytest.mark.parametrize(
    ("before", "after"),
    [(sharded, sharded), (sharded, DistributedDataParallel), (DistributedDataParallel, sharded)],
    ids=["sharded", "sharded before", "sharded after"],
)
def test_a_training_goes_on_from_a_checkpoint(before: Any, after: Any, folder: Path) -> None:
    model = before(model_of())
    optimizer = adam(model.parameters())
    train(model, optimizer, steps=range(2))
    dcp.save(states(model, optimizer), checkpoint_id=folder)
    other = after(model_of(5))
    again = adam(other.parameters())
    loaded = states(other, again)
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(other, again, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    train(other, again, steps=[2])
    assert_equal(other, trained_alone(optimizer=adam))


def test_saved_beside_the_training(folder: Path) -> None:
    """async_save writes in a thread of its own, with collectives of a group that must be able to run beside."""
    model = sharded(model_of())
    state = {"model": get_model_state_dict(model)}
    saving = dcp.async_save(state, checkpoint_id=folder, process_group=dist.new_group())
    train(model, adam(model.parameters()))
    saving.result()
    other = sharded(model_of(5))
    state = {"model": get_model_state_dict(other)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(other, state["model"])
    assert_equal(other, model_of())


def test_the_whole_state_comes_together_and_goes_out_again() -> None:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = get_model_state_dict(sharded(model_of()), options=options)
    assert list(whole) == (list(model_of().state_dict()) if dist.get_rank() == 0 else [])
    other = sharded(model_of(5))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, whole if dist.get_rank() == 0 else {}, options=options)
    assert_equal(other, model_of())


# -- ZeroRedundancyOptimizer -----------------------------------------------------------------------------------


def zero(model: nn.Module, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> Any:
    """Torch's."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(model.parameters(), optimizer, **{"lr": 0.01, "foreach": False, **options})


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("place", ["over all ranks", "in a half of the ranks"])
def test_an_optimizer_whose_state_is_shared_out(place: str) -> None:
    with halves() if "half" in place else nullcontext() as group:
        model = DistributedDataParallel(model_of(), process_group=group)
        optimizer = zero(model, parameters_as_bucket_view=group is None, process_group=group)
        train(model, optimizer, group)
        shares = dist.get_world_size(group)
    assert_equal(model, trained_alone(optimizer=adam))
    assert shares == 1 or len(optimizer.optim.state) < len(list(model.parameters()))


def test_its_state_comes_together_on_one_rank_and_goes_out_again() -> None:
    model = DistributedDataParallel(model_of())
    optimizer = zero(model)
    train(model, optimizer, steps=range(2))
    last = dist.get_world_size() - 1
    optimizer.consolidate_state_dict(to=last)
    states = [optimizer.state_dict() if dist.get_rank() == last else None]
    dist.broadcast_object_list(states, src=last)
    other = zero(model, lr=1.0)
    other.load_state_dict(states[0])
    train(model, other, steps=[2])
    assert_equal(model, trained_alone(optimizer=adam))


def test_it_steps_inside_of_a_hook_while_backward_goes_on() -> None:
    if dist.get_backend() == "gloo":
        pytest.skip("torch refuses it with gloo")
    from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    model = DistributedDataParallel(model_of(), gradient_as_bucket_view=True, static_graph=True)
    optimizer = zero(model, torch.optim.SGD, overlap_with_ddp=True, parameters_as_bucket_view=True, lr=0.1)
    model.register_comm_hook(None, hook_with_zero_step(allreduce_hook, model, optimizer))
    # Three backwards pass until the buckets are known, without an update.
    train(model, optimizer, steps=[0, 0, 0, 0, 1, 2])
    assert_equal(model, trained_alone(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)))


def test_ranks_without_inputs_go_on_updating_their_share() -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)))
    optimizer = zero(model, torch.optim.Adam)
    with Join([model, optimizer]):
        for _ in range(3 + dist.get_rank()):
            optimizer.zero_grad()
            model(torch.ones(1)).sum().backward()
            optimizer.step()
    assert same_on_all_ranks(model.parameters())
    steps = {int(state["step"]) for state in optimizer.optim.state.values()}
    assert steps <= {3 + dist.get_world_size() - 1}
