"""hvd.join() with optimizers: ranks that are out of batches contribute zeros to the gradients of the others."""

from types import ModuleType

import pytest
import torch

from hvlike.collectives.session.context import current

STEPS = 3


def model_of(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(5, 150), torch.nn.Tanh(), torch.nn.Linear(150, 2))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * rank + step))


def steps_of(rank: int, epoch: int, size: int) -> int:
    """How many batches a rank has; some have none, and it changes from epoch to epoch."""
    return STEPS * ((rank + epoch) % size)


def loss_of(model: torch.nn.Module, data: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(data).pow(2).mean()
    return loss


def reference(epochs: int, size: int, momentum: float) -> list[torch.Tensor]:
    """One process: the sum of the gradients of those that have a batch, divided by all ranks."""
    model = model_of(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    for epoch in range(epochs):
        counts = [steps_of(rank, epoch, size) for rank in range(size)]
        for step in range(max(counts)):
            optimizer.zero_grad()
            for rank in range(size):
                if step < counts[rank]:
                    (loss_of(model, batch(rank, step)) / size).backward()
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_uneven_batches_equal_one_process(hvd: ModuleType, compression: str) -> None:
    rank, size, epochs = hvd.rank(), hvd.size(), 3
    model = model_of(0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.0),
        named_parameters=model.named_parameters(),
        compression=getattr(hvd.Compression, compression),
    )
    for epoch in range(epochs):
        for step in range(steps_of(rank, epoch, size)):
            optimizer.zero_grad()
            loss_of(model, batch(rank, step)).backward()
            optimizer.step()
        last = hvd.join()
        # Without the gradients of the steps it missed a rank has other parameters: it takes those of the last one.
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if compression == "none" else {"rtol": 1e-2, "atol": 1e-2}
    for mine, expected in zip(model.parameters(), reference(epochs, size, 0.0), strict=True):
        torch.testing.assert_close(mine.detach(), expected, **tolerance)


def test_two_optimizers_and_named_operations_between_their_steps(hvd: ModuleType) -> None:
    rank, size = hvd.rank(), hvd.size()
    models = [model_of(0), model_of(1)]
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        for model in models
    ]
    for epoch in range(2):
        for step in range(steps_of(rank, epoch, size)):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                loss_of(model, batch(rank, step)).backward()
                optimizer.step()
                total = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
                assert 1 <= total <= size
        last = hvd.join()
        for model in models:
            hvd.broadcast_parameters(model.state_dict(), root_rank=last)
    states = hvd.allgather_object([each.state_dict()["0.weight"].sum().item() for each in models])
    assert all(state == states[0] for state in states)


def test_parameters_that_change_while_a_rank_has_joined(hvd: ModuleType) -> None:
    """The active ranks plan anew; the rank that has joined follows, and all can plan again afterwards."""
    rank, size = hvd.rank(), hvd.size()
    model = model_of(0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())

    def train(steps: int) -> None:
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(model, batch(rank, step)).backward()
            optimizer.step()

    train(2)
    if rank < size - 1:
        model[0].weight.requires_grad_(False)
        train(2)
        model[0].weight.requires_grad_(True)
        train(2)
    hvd.join()
    train(2)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)


def test_no_queues_pile_up_over_epochs(hvd: ModuleType) -> None:
    rank, size = hvd.rank(), hvd.size()
    model = model_of(0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    queues = []
    for epoch in range(6):
        for step in range(steps_of(rank, epoch, size)):
            optimizer.zero_grad()
            loss_of(model, batch(rank, step)).backward()
            optimizer.step()
        hvd.join()
        queues.append(len(current().find_set(None, "test").queues.all()))
    assert queues[-1] == queues[2]


def test_join_between_backward_and_step_is_refused(hvd: ModuleType) -> None:
    model = model_of(0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model, batch(hvd.rank(), 0)).backward()
        if _ == 1 and hvd.size() > 1:
            with pytest.raises(ValueError, match=r"hvd.join\(\) between backward and step"):
                hvd.join()
        optimizer.step()
    hvd.join()
