"""With op=Adasum each rank has an optimizer state of its own, which survives the loss of ranks."""

from types import ModuleType

import pytest
import torch
from support.training.pretended_loss import COMMIT, after_loss, give_back
from support.training.problem import loss_of, make_model, same_on_all_ranks, share, whole_batch
from torch import nn

from hvlike.training.distributed_optimizer import DistributedOptimizer
from hvlike.training.elastic.local_state import LocalStates


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
