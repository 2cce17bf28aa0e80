"""A DistributedDataParallel in a hvlike that was started anew: nothing is left of the pass that was interrupted."""

from types import ModuleType

import pytest
import torch
from support.training.problem import loss_of, make_model, same_on_all_ranks, share, whole_batch
from torch import nn

from hvlike.elastic import TorchState
from hvlike.nn import DistributedDataParallel


def train(hvd: ModuleType, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Some steps on shares of the batch."""
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, share(hvd, whole_batch(step))).backward()
        optimizer.step()


def fail(gradient: torch.Tensor) -> None:
    """A hook that ends the pass."""
    raise ValueError("in the middle")


@pytest.mark.mpi(min_size=2)
def test_a_pass_that_was_interrupted_on_some_ranks_is_forgotten(hvd: ModuleType) -> None:
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TorchState(model=model, optimizer=optimizer)
    train(hvd, model, optimizer, range(4))
    state.commit()
    train(hvd, model, optimizer, range(4, 7))
    expected = [parameter.detach().clone() for parameter in model.parameters()]
    if hvd.rank() == 0:
        loss = loss_of(model, share(hvd, whole_batch(9)))
        hook = next(model.parameters()).register_hook(fail)
        with pytest.raises(ValueError, match="in the middle"):
            loss.backward()
        hook.remove()
    hvd.shutdown()
    hvd.init()
    state.restore()
    state.reset()
    state.sync()
    train(hvd, model, optimizer, range(4, 7))
    assert same_on_all_ranks(model.parameters())
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), expected, strict=True))
