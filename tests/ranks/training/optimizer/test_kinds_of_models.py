"""Compiled, DataParallel and checkpointed models reach the hooks like any other."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from support.training.problem import largest_difference, loss_of, make_model, same_on_all_ranks, share, whole_batch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hvlike.training.distributed_optimizer import DistributedOptimizer
from hvlike.training.gradients.grad_state import Phase


class Checkpointed(nn.Module):
    """Computes the first layers twice instead of keeping what they made."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = checkpoint(self.inner[:2], inputs, use_reentrant=False)
        return self.inner[2:](hidden)


KINDS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compiled, eager backend": lambda model: torch.compile(model, backend="eager"),
    "compiled, aot_eager backend": lambda model: torch.compile(model, backend="aot_eager"),
    "DataParallel": nn.DataParallel,
    "checkpointed": Checkpointed,
}


def skip_on_many_ranks(hvd: ModuleType) -> None:
    """Compiling takes each of them seconds, and makes of a model the same wherever it is trained."""
    if hvd.size() > 2:
        pytest.skip("compiled on up to two ranks")


@pytest.mark.filterwarnings("ignore")  # what torch.compile warns about its own imports
@pytest.mark.parametrize("kind", KINDS)
def test_models(hvd: ModuleType, kind: str) -> None:
    if kind.startswith("compiled"):
        skip_on_many_ranks(hvd)
    expected = make_model()
    plain = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    model = KINDS[kind](make_model())
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), named_parameters=model.named_parameters()
    )
    for step in range(3):
        plain.zero_grad()
        loss_of(expected, whole_batch(step)).backward()
        plain.step()
        optimizer.zero_grad()
        loss_of(model, share(hvd, whole_batch(step))).backward()
        assert optimizer.gradients.phase is Phase.REDUCING
        optimizer.step()
    assert largest_difference(model.parameters(), expected.parameters()) < 1e-6
    assert same_on_all_ranks(model.parameters())


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_training_step(hvd: ModuleType) -> None:
    skip_on_many_ranks(hvd)
    model = make_model()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @torch.compile(backend="eager")
    def train(batch: tuple[Tensor, Tensor]) -> None:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()

    for step in range(3):
        train(share(hvd, whole_batch(step)))
    expected = make_model()
    plain = torch.optim.SGD(expected.parameters(), lr=0.1)
    for step in range(3):
        plain.zero_grad()
        loss_of(expected, whole_batch(step)).backward()
        plain.step()
    assert largest_difference(model.parameters(), expected.parameters()) < 1e-6


def test_retain_graph_and_create_graph(hvd: ModuleType) -> None:
    model = make_model()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), backward_passes_per_step=2)
    loss = loss_of(model, share(hvd, whole_batch()))
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()
    assert same_on_all_ranks(model.parameters())


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_gradient_penalty(hvd: ModuleType) -> None:
    model = make_model()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(2):
        optimizer.zero_grad()
        inputs, targets = share(hvd, whole_batch(step))
        inputs.requires_grad_(True)
        loss = loss_of(model, (inputs, targets))
        (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
        (loss + slope.square().sum()).backward()
        optimizer.step()
    assert same_on_all_ranks(model.parameters())
    optimizer.zero_grad()
    loss_of(model, share(hvd, whole_batch())).backward(create_graph=True)
    optimizer.step()
    assert same_on_all_ranks(model.parameters())
    optimizer.zero_grad()
