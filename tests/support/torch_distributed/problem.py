"""A small problem for programs of torch.distributed: shares of whole batches, and what one process makes of them."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from support.training.problem import loss_of, make_model, whole_batch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

STEPS = 3

Batch = tuple[Tensor, Tensor]
MakeOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


def sgd(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """The optimizer of most tests."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """One with more state."""
    return torch.optim.AdamW(parameters, lr=0.01, foreach=False)


def model_of(seed: int = 0) -> nn.Module:
    """Double precision makes the comparison sharp."""
    return make_model(seed).double()


def batch_of(step: int) -> Batch:
    """The whole batch of a step."""
    inputs, targets = whole_batch(step)
    return inputs.double(), targets.double()


def share(batch: Batch, group: dist.ProcessGroup | None = None) -> Batch:
    """This rank's part of a whole batch."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    return batch[0][rank::size], batch[1][rank::size]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    group: dist.ProcessGroup | None = None,
    steps: Iterable[int] = range(STEPS),
) -> None:
    """Steps on this rank's shares."""
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, share(batch_of(step), group)).backward()
        optimizer.step()


def trained_alone(
    make: Callable[[], nn.Module] = model_of, optimizer: MakeOptimizer = sgd, steps: Iterable[int] = range(STEPS)
) -> nn.Module:
    """What one process gets from the whole batches."""
    model = make()
    made = optimizer(model.parameters())
    for step in steps:
        made.zero_grad()
        loss_of(model, batch_of(step)).backward()
        made.step()
    return model


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, wherever its parts lie."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def assert_equal(got: nn.Module | Iterable[Tensor], expected: nn.Module | Iterable[Tensor], **tolerance: float) -> None:
    """Both have the same values, but for the order in which doubles were added up."""
    first, second = (each.parameters() if isinstance(each, nn.Module) else each for each in (got, expected))
    limits = {"rtol": 1e-9, "atol": 1e-10, **tolerance}
    for mine, theirs in zip(first, second, strict=True):
        torch.testing.assert_close(whole(mine), whole(theirs), **limits)


def same_on_all_ranks(tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> bool:
    """True if every rank has bitwise the same values."""
    mine = torch.cat([tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors])
    everybody = mine.new_empty(dist.get_world_size(group) * mine.numel())
    dist.all_gather_into_tensor(everybody, mine, group=group)
    return bool((everybody.view(-1, mine.numel()) == mine).all())


@contextmanager
def halves() -> Iterator[dist.ProcessGroup]:
    """The group of the even ranks on these, of the odd ones on those."""
    size = dist.get_world_size()
    groups = [dist.new_group(list(range(start, size, 2)), timeout=timedelta(seconds=60)) for start in range(2)]
    mine = groups[dist.get_rank() % 2]
    yield mine
    dist.destroy_process_group(mine)
