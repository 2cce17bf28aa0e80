"""Sum, predivision and compressors give the gradients they promise."""

from types import ModuleType
from typing import Any

import pytest
import torch
from support.training.problem import same_on_all_ranks
from torch import Tensor, nn

from hvlike.collectives.compression import Compression, Compressor
from hvlike.errors import HorovodInternalError
from hvlike.training.distributed_optimizer import DistributedOptimizer


def reduced(hvd: ModuleType, value: float, **options: Any) -> Tensor:
    """The gradient after the reduction where rank r has r * value + 1."""
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), **options)
    (parameter * (hvd.rank() * value + 1)).sum().backward()
    optimizer.synchronize()
    assert same_on_all_ranks([parameter.grad])
    return parameter.grad


def total(hvd: ModuleType, value: float) -> float:
    return sum(rank * value + 1 for rank in range(hvd.size()))


def test_sum(hvd: ModuleType) -> None:
    torch.testing.assert_close(reduced(hvd, 2.0, op=hvd.Sum), torch.full((3,), total(hvd, 2.0)))


@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0, 1024.0])
def test_predivision_changes_rounding_only(hvd: ModuleType, factor: float) -> None:
    gradient = reduced(hvd, 2.0, gradient_predivide_factor=factor)
    torch.testing.assert_close(gradient, torch.full((3,), total(hvd, 2.0) / hvd.size()))


def test_averages_of_large_halves_do_not_overflow(hvd: ModuleType) -> None:
    gradient = reduced(hvd, 0.0, compression=Compression.fp16)
    torch.testing.assert_close(gradient, torch.ones(3))
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), compression=Compression.fp16)
    (parameter * 40000.0).sum().backward()
    optimizer.synchronize()
    torch.testing.assert_close(parameter.grad, torch.full((3,), 40000.0))


class Halving(Compressor):
    """Sends half of the value, in float64."""

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor.double() / 2, tensor.dtype

    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor:
        return (tensor * 2).to(ctx)


class HorovodStyle:
    """A class with static methods, as users of Horovod have written them."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor.to(torch.bfloat16), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor.to(ctx)


@pytest.mark.parametrize("compression", [Halving(), HorovodStyle, HorovodStyle()])
def test_a_users_own_compressor(hvd: ModuleType, compression: Any) -> None:
    for _ in range(2):
        gradient = reduced(hvd, 2.0, compression=compression)
        torch.testing.assert_close(gradient, torch.full((3,), total(hvd, 2.0) / hvd.size()), rtol=1e-2, atol=0)
        assert gradient.dtype is torch.float32


@pytest.mark.mpi(min_size=2)
def test_different_settings_are_an_error_on_every_rank_and_the_job_goes_on(hvd: ModuleType) -> None:
    parameter = nn.Parameter(torch.zeros(3))
    op = hvd.Sum if hvd.rank() == 0 else hvd.Average
    optimizer = DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), op=op)
    parameter.sum().backward()
    with pytest.raises(
        HorovodInternalError, match=r"Mismatched settings of .*, op: rank 0 has Sum, rank 1 has Average\."
    ):
        optimizer.step()
    torch.testing.assert_close(reduced(hvd, 1.0), torch.full((3,), total(hvd, 1.0) / hvd.size()))


@pytest.mark.mpi(min_size=2)
def test_different_parameters_are_an_error_on_every_rank_and_the_job_goes_on(hvd: ModuleType) -> None:
    for shape, match in (((3 + hvd.rank(),), "Mismatched shapes.*'noname.0.0'"), ((3,), "Mismatched parameters")):
        parameters = [nn.Parameter(torch.zeros(shape))]
        if match == "Mismatched parameters" and hvd.rank() == 0:
            parameters.append(nn.Parameter(torch.zeros(2)))
        optimizer = DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0))
        sum(parameter.sum() for parameter in parameters).backward()
        with pytest.raises(HorovodInternalError, match=f"(?s){match}.*rank 0"):
            optimizer.step()
    torch.testing.assert_close(reduced(hvd, 1.0), torch.full((3,), total(hvd, 1.0) / hvd.size()))
