"""Arguments of DistributedOptimizer: what sum, predivision, groups and compressors promise; wrong ones are refused."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from support.training.problem import make_model, same_on_all_ranks
from torch import Tensor, nn

from hvlike import Compression, DistributedOptimizer
from hvlike.collectives.compression import Compressor
from hvlike.errors import HorovodInternalError, UsageError


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


Arguments = Callable[[nn.Module], dict[str, Any]]


REFUSED: dict[str, tuple[Arguments, str]] = {
    "items that are no tuples": (
        lambda model: {"named_parameters": list(model.parameters())},
        "named_parameters should be a sequence of tuples",
    ),
    "a mapping of names": (
        lambda model: {"named_parameters": dict(model.named_parameters())},
        "named_parameters should be a sequence of tuples .* Got dict",
    ),
    "duplicate names": (
        lambda model: {"named_parameters": [("a", parameter) for parameter in model.parameters()]},
        "Parameter names in named_parameters must be unique. Found duplicates: a",
    ),
    "unnamed parameters": (
        lambda model: {"named_parameters": list(model.named_parameters())[1:]},
        r"one or more model parameters were not named. Python object ids: \d+ \(shapes \[16, 6\]\)",
    ),
    "no passes": (lambda model: {"backward_passes_per_step": 0}, "backward_passes_per_step must be > 0, got 0"),
    "a fraction of a pass": (lambda model: {"backward_passes_per_step": 1.5}, "backward_passes_per_step must be > 0"),
    "a negative number of groups": (lambda model: {"groups": -1}, "groups should be a non-negative integer or a list"),
    "groups by name": (lambda model: {"groups": "all"}, "groups should be a non-negative integer or a list"),
    "groups of names": (lambda model: {"groups": [["0.weight"]]}, "groups must consist of torch.Tensor"),
    "flat groups": (lambda model: {"groups": list(model.parameters())}, "groups should be a non-negative integer"),
    "a parameter twice in groups": (
        lambda model: {"groups": [list(model.parameters()), list(model.parameters())[:1]]},
        "A parameter can only appear once in groups.",
    ),
    "Min": (lambda model: {"op": 3}, "op Min is not supported for gradients; expected Average, Sum or Adasum"),
    "no op": (lambda model: {"op": 99}, "op 99 is not a reduction"),
    "predivide with Sum": (
        lambda model: {"op": 1, "gradient_predivide_factor": 2.0},
        "gradient_predivide_factor not supported with op != Average",
    ),
    "predivide by zero": (lambda model: {"gradient_predivide_factor": 0.0}, "gradient_predivide_factor must be > 0"),
    "no compressor": (lambda model: {"compression": "fp16"}, r"compression must have the methods compress\(tensor\)"),
    "no process set": (lambda model: {"process_set": hash}, "ProcessSet"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(hvd: ModuleType, what: str) -> None:
    arguments, text = REFUSED[what]
    model = make_model()
    with pytest.raises(UsageError, match=text):
        DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **arguments(model))


def test_something_that_is_no_optimizer(hvd: ModuleType) -> None:
    with pytest.raises(UsageError, match=r"expects a torch.optim.Optimizer, got Sequential"):
        DistributedOptimizer(make_model())


def test_wrapping_twice(hvd: ModuleType) -> None:
    optimizer = DistributedOptimizer(torch.optim.SGD(make_model().parameters(), lr=0.1))
    with pytest.raises(UsageError, match=r"is distributed already\. Wrap it once"):
        DistributedOptimizer(optimizer)


@pytest.mark.parametrize("groups", [None, 0, 1, 2, 100])
def test_any_number_of_groups(hvd: ModuleType, groups: int | None) -> None:
    model = make_model()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), groups=groups)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()


def test_num_groups_is_the_older_name(hvd: ModuleType) -> None:
    model = make_model()
    with pytest.warns(DeprecationWarning, match="`num_groups` has been replaced by `groups`") as warned:
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), num_groups=2)
    assert warned[0].filename == __file__
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()


def test_more_names_than_parameters_are_fine(hvd: ModuleType) -> None:
    model = make_model()
    DistributedOptimizer(torch.optim.SGD(list(model.parameters())[:2], lr=0.1), model.named_parameters())
