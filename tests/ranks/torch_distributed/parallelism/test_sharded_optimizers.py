"""torch's ZeroRedundancyOptimizer: each rank updates its share, and all get the others'."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.torch_distributed.problem import (
    adam,
    assert_equal,
    halves,
    model_of,
    same_on_all_ranks,
    train,
    trained_alone,
)
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel


def ZeroRedundancyOptimizer(*arguments: Any, **options: Any) -> Any:
    """Torch's. The import takes half a second, which every job would pay that collects this file."""
    from torch.distributed import optim

    return optim.ZeroRedundancyOptimizer(*arguments, **options)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("as_view", [False, True])
def test_as_one_process(as_view: bool) -> None:
    model = DistributedDataParallel(model_of())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=as_view, lr=0.01, foreach=False
    )
    train(model, optimizer)
    assert_equal(model, trained_alone(optimizer=adam))
    assert len(optimizer.optim.state) < len(list(model.parameters()))


def test_its_state_comes_together_on_one_rank_and_goes_out_again() -> None:
    model = DistributedDataParallel(model_of())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01, foreach=False)
    train(model, optimizer, steps=range(2))
    last = dist.get_world_size() - 1
    optimizer.consolidate_state_dict(to=last)
    states = [optimizer.state_dict() if dist.get_rank() == last else None]
    dist.broadcast_object_list(states, src=last)
    other = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1.0, foreach=False)
    other.load_state_dict(states[0])
    train(model, other, steps=[2])
    assert_equal(model, trained_alone(optimizer=adam))


def test_inside_of_a_hook_while_backward_goes_on() -> None:
    if dist.get_backend() == "gloo":
        pytest.skip("torch refuses it with gloo")
    from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    model = DistributedDataParallel(model_of(), gradient_as_bucket_view=True, static_graph=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, overlap_with_ddp=True, parameters_as_bucket_view=True, lr=0.1
    )
    model.register_comm_hook(None, hook_with_zero_step(allreduce_hook, model, optimizer))
    # Three backwards pass until the buckets are known, without an update.
    train(model, optimizer, steps=[0, 0, 0, 0, 1, 2])
    assert_equal(model, trained_alone(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)))


@pytest.mark.mpi(min_size=2)
def test_in_a_half_of_the_ranks() -> None:
    with halves() as group:
        model = DistributedDataParallel(model_of(), process_group=group)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, process_group=group, lr=0.01, foreach=False
        )
        train(model, optimizer, group)
    assert_equal(model, trained_alone(optimizer=adam))


def test_ranks_without_inputs_go_on_updating_their_share() -> None:
    layers = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))
    model = DistributedDataParallel(layers)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    with Join([model, optimizer]):
        for _ in range(3 + dist.get_rank()):
            optimizer.zero_grad()
            model(torch.ones(1)).sum().backward()
            optimizer.step()
    assert same_on_all_ranks(model.parameters())
    steps = {int(state["step"]) for state in optimizer.optim.state.values()}
    assert steps <= {3 + dist.get_world_size() - 1}
