"""HVLIKE_GRADIENTS=horovod: what flows back through each collective is what Horovod has there, not the derivative.

Each rank's loss is its own weights times its output, so that the weights are what comes in from behind.
"""

import logging
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor

from hvlike.errors import UsageError


def weights(rank: int, rows: int) -> Tensor:
    return torch.arange(2.0 * rows).reshape(rows, 2) + 10 * rank + 1


@pytest.fixture(scope="module")
def horovods(hvd: ModuleType) -> Iterator[ModuleType]:
    hvd.shutdown()
    hvd.init(gradients="horovod")
    yield hvd
    hvd.shutdown()
    hvd.init()


def gradient(leaf: Tensor, output: Tensor, weight: Tensor) -> Tensor:
    (weight * output).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def everybody(hvd: ModuleType, rows: int) -> list[Tensor]:
    return [weights(rank, rows) for rank in range(hvd.size())]


def test_allgather_and_broadcast_take_the_mean_of_all_ranks(horovods: ModuleType) -> None:
    hvd = horovods
    rank, size = hvd.rank(), hvd.size()
    leaf = torch.ones(1, 2, requires_grad=True)
    mean = torch.stack(everybody(hvd, size)).mean(0)
    torch.testing.assert_close(gradient(leaf, hvd.allgather(leaf), weights(rank, size)), mean[rank : rank + 1])

    leaves = [torch.ones(1, 2, requires_grad=True), torch.ones(1, 2, requires_grad=True)]
    for output in hvd.grouped_allgather(leaves):
        (weights(rank, size) * output).sum().backward()
    for leaf in leaves:
        torch.testing.assert_close(leaf.grad, mean[rank : rank + 1])

    leaf = torch.ones(3, 2, requires_grad=True)
    found = gradient(leaf, hvd.broadcast(leaf, 0), weights(rank, 3))
    torch.testing.assert_close(found, torch.stack(everybody(hvd, 3)).mean(0) * (rank == 0))


def test_reducescatter_multiplies_the_derivative_by_the_size(horovods: ModuleType) -> None:
    hvd = horovods
    for op, factor in ((hvd.Sum, hvd.size()), (hvd.Average, 1)):
        leaf = torch.ones(hvd.size(), 2, requires_grad=True)
        output = hvd.reducescatter(leaf, op=op, prescale_factor=2.0, postscale_factor=3.0)
        torch.testing.assert_close(
            gradient(leaf, output, weights(hvd.rank(), 1)), 6.0 * factor * torch.cat(everybody(hvd, 1))
        )


def test_allreduce_applies_its_op_to_the_gradients_too(horovods: ModuleType) -> None:
    hvd = horovods
    for op, expected in ((hvd.Min, weights(0, 3)), (hvd.Max, weights(hvd.size() - 1, 3))):
        leaf = torch.ones(3, 2, requires_grad=True)
        torch.testing.assert_close(gradient(leaf, hvd.allreduce(leaf, op=op), weights(hvd.rank(), 3)), expected)
    for op, every in ((hvd.Sum, torch.stack(everybody(hvd, 3)).sum(0)), (hvd.Adasum, None)):
        leaf = torch.ones(3, 2, requires_grad=True)
        found = gradient(leaf, hvd.allreduce(leaf, op=op), weights(hvd.rank(), 3))
        again = hvd.allreduce(weights(hvd.rank(), 3), op=op)
        torch.testing.assert_close(found, again if every is None else every)


def test_each_output_of_a_group_has_a_backward_of_its_own(horovods: ModuleType) -> None:
    hvd = horovods
    for op in (hvd.Min, hvd.Max, hvd.Product):
        leaves = [torch.ones(3, 2, requires_grad=True), torch.ones(3, 2, requires_grad=True)]
        for output in hvd.grouped_allreduce(leaves, op=op):
            (weights(hvd.rank(), 3) * output).sum().backward()
        expected = hvd.allreduce(weights(hvd.rank(), 3), op=op)
        for leaf in leaves:
            torch.testing.assert_close(leaf.grad, expected)


def test_alltoall_and_the_second_derivative_of_allgather_are_no_different(horovods: ModuleType) -> None:
    hvd = horovods
    rank, size = hvd.rank(), hvd.size()
    leaf = torch.ones(size, 2, requires_grad=True)
    expected = torch.cat([each[rank : rank + 1] for each in everybody(hvd, size)])
    torch.testing.assert_close(gradient(leaf, hvd.alltoall(leaf), weights(rank, size)), expected)

    leaf = torch.full((1, 2), 2.0, requires_grad=True)
    (first,) = torch.autograd.grad((hvd.allgather(leaf) ** 2).sum(), leaf, create_graph=True)
    # The mean over ranks of 2 x, whose derivative is 2 on each rank; Horovod has the mean once more on the way.
    torch.testing.assert_close(first, 2 * leaf.detach())
    (second,) = torch.autograd.grad(first.sum(), leaf)
    torch.testing.assert_close(second, torch.full((1, 2), 2.0 / size))


def test_it_is_said_once_by_the_first_rank(horovods: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    horovods.shutdown()
    horovods.init(gradients="horovod")
    with caplog.at_level(logging.WARNING, logger="hvlike"):
        for _ in range(2):
            leaf = torch.ones(1, requires_grad=True)
            horovods.broadcast(leaf, 0).sum().backward()
            horovods.allgather(leaf).sum().backward()
    said = [each for each in caplog.messages if "HVLIKE_GRADIENTS" in each]
    assert len(said) == (horovods.rank() == 0)
    assert all(each.startswith("broadcast: backward gives Horovod's gradient, which is 1/size of") for each in said)


def test_another_word_is_refused_on_every_rank(horovods: ModuleType) -> None:
    horovods.shutdown()
    with pytest.raises(UsageError, match="HVLIKE_GRADIENTS='true': expected one of adjoint, horovod"):
        horovods.init(gradients="true")
    horovods.init(gradients="horovod")
