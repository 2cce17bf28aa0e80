"""What each rank has of its own survives the loss of ranks: states under Adasum, shards of ZeRO.

The run goes on as if nothing was lost.
"""

from copy import deepcopy
from types import ModuleType
from typing import Any

import pytest
import torch
from support.training.pretended_loss import COMMIT, after_loss, give_back
from support.training.problem import loss_of, make_model, same_on_all_ranks, share, whole_batch
from support.training.zero_problem import batch, difference, net
from torch import nn
from torch.optim import Adam

from hvlike import DistributedOptimizer
from hvlike.optim import ZeroRedundancyOptimizer
from hvlike.training.elastic.local_state import LocalStates
from hvlike.training.zero.exchange import Partition
from hvlike.training.zero.sharded_state import make_shard


def make(hvd: ModuleType) -> tuple[nn.Module, DistributedOptimizer]:
    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, hvd.DistributedOptimizer(sgd, model.named_parameters(), op=hvd.Adasum)


def train(hvd: ModuleType, model: nn.Module, optimizer: DistributedOptimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, share(hvd, whole_batch(step))).backward()
        optimizer.step()


def momenta(optimizer: DistributedOptimizer) -> list[torch.Tensor]:
    return [state["momentum_buffer"] for state in optimizer.state_dict()["state"].values()]


@pytest.mark.parametrize("op", ["Adasum", "Average"])
def test_fewer_ranks_take_the_states_of_their_numbers(hvd: ModuleType, op: str) -> None:
    before = hvd.size() + 1
    states = {}
    for rank in range(before):
        _, other = make(hvd)
        state = other.state_dict()
        state["param_groups"][0]["lr"] = rank + 0.5
        states[rank] = {"process_set": 0, "rank": rank, "optimizer": state}
    for lost in range(before):
        model = make_model()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), op=getattr(hvd, op))
        give_back(after_loss(hvd, states, [lost]), COMMIT, optimizer)
        assert optimizer.param_groups[0]["lr"] == (hvd.rank() + 0.5 if op == "Adasum" else 0.1)


@pytest.mark.mpi(min_size=2)
def test_a_spare_goes_on_with_the_state_of_the_lost_rank(hvd: ModuleType) -> None:
    model, optimizer = make(hvd)
    held = LocalStates("optimizer")
    train(hvd, model, optimizer, range(3))
    held.save(1, optimizer.local_state_dict)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert not same_on_all_ranks(momenta(optimizer))
    train(hvd, model, optimizer, range(3, 5))
    expected = [*model.parameters(), *momenta(optimizer)]
    if hvd.rank() == 1:
        held, (model, optimizer) = LocalStates("optimizer"), make(hvd)
    else:
        expected = [tensor.clone() for tensor in expected]
    hvd.shutdown()
    hvd.init()
    model.load_state_dict(weights)
    give_back(held, 1, optimizer)
    train(hvd, model, optimizer, range(3, 5))
    got = [*model.parameters(), *momenta(optimizer)]
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


def train_alike(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()


def shards_of(optimizer: Adam, ranks: int, step: int) -> dict[int, dict[str, Any]]:
    """What the local states of that many ranks would be."""
    whole = optimizer.state_dict()
    partition = Partition(optimizer.param_groups, ranks)
    parts = [{place: whole["state"][place] for place in partition.owned(rank)} for rank in range(ranks)]
    return {
        rank: make_shard({**whole, "state": part}, rank, ranks, step) | {"process_set": 0}
        for rank, part in enumerate(parts)
    }


def pair() -> tuple[torch.nn.Module, Adam]:
    """A plain run of three steps."""
    plain = net()
    reference = Adam(plain.parameters(), lr=0.01)
    train_alike(plain, reference, range(3))
    return plain, reference


@pytest.mark.parametrize("lost", [[0], [1], [0, 2]])
@pytest.mark.parametrize("options", [{}, {"parameters_as_bucket_view": True}, {"reduce_gradients": True}])
def test_fewer_ranks_share_the_state_anew(hvd: ModuleType, lost: list[int], options: dict[str, bool]) -> None:
    plain, reference = pair()
    ours = net()
    ours.load_state_dict(plain.state_dict())
    optimizer = ZeroRedundancyOptimizer(ours.parameters(), Adam, lr=0.5, **options)
    # As it was with more ranks.
    optimizer.rank, optimizer.world_size = -1, 99
    shards = shards_of(reference, hvd.size() + len(lost), 3)
    if len(lost) == 2 and hvd.size() == 1:
        pytest.skip("they would be neighbours")
    give_back(after_loss(hvd, shards, lost), COMMIT, optimizer)
    assert (optimizer.rank, optimizer.world_size) == (hvd.rank(), hvd.size())
    # Nothing keeps the shards of others alive.
    held = {value.untyped_storage().nbytes() for each in optimizer.optim.state.values() for value in each.values()}
    assert max(held, default=0) <= max(each.nbytes for each in ours.parameters())
    train_alike(ours, optimizer, range(3, 6))
    train_alike(plain, reference, range(3, 6))
    assert difference(ours, plain) <= (1e-6 if options.get("reduce_gradients") else 0)
    assert optimizer.sharded_state_dict()["shard"] == {"rank": hvd.rank(), "size": hvd.size(), "step": 6}


def test_a_checkpoint_takes_the_place_of_shards_that_are_lost(hvd: ModuleType) -> None:
    """Ranks that are new have counted fewer steps: all count from the checkpoint on."""
    plain, reference = pair()
    ours = net()
    optimizer = ZeroRedundancyOptimizer(ours.parameters(), Adam, lr=0.5)
    train_alike(ours, optimizer, range(4))
    held = after_loss(hvd, shards_of(reference, hvd.size() + 2, 3), [0, 1])
    found = held.find(COMMIT)
    assert found.lost == [0]
    held.give_up(found, optimizer)
    ours.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(deepcopy(reference.state_dict()))
    train_alike(ours, optimizer, range(3, 6))
    train_alike(plain, reference, range(3, 6))
    assert difference(ours, plain) == 0
    assert optimizer.sharded_state_dict()["shard"]["step"] == 3


@pytest.mark.mpi(min_size=2)
def test_a_spare_takes_over_the_shard_of_a_lost_rank(hvd: ModuleType) -> None:
    plain, reference = pair()
    ours = net()
    ours.load_state_dict(plain.state_dict())
    optimizer = ZeroRedundancyOptimizer(ours.parameters(), Adam, lr=0.01)
    optimizer.load_state_dict(deepcopy(reference.state_dict()))
    held = LocalStates("optimizer")
    train_alike(ours, optimizer, range(3, 4))
    held.save(1, optimizer.local_state_dict)
    weights = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    train_alike(ours, optimizer, range(8, 10))
    hvd.shutdown()
    hvd.init()
    new = ZeroRedundancyOptimizer(ours.parameters(), Adam, lr=0.5)
    if hvd.rank() == 1:
        held, optimizer = LocalStates("optimizer"), new
    ours.load_state_dict(weights)
    give_back(held, 1, optimizer)
    train_alike(ours, optimizer, range(4, 6))
    train_alike(plain, reference, range(3, 6))
    assert difference(ours, plain) == 0
    # Any rank can still ask the others for the whole state.
    if hvd.rank() == 0:
        whole = optimizer.state_dict()["state"]
        assert all(torch.equal(whole[0][key], value) for key, value in reference.state_dict()["state"][0].items())
    hvd.barrier()
