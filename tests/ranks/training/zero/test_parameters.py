"""What the constructor accepts, refuses and makes of parameters; those that share memory get all their updates."""

from types import ModuleType
from typing import Any

import pytest
import torch
from support.training.problem import same_on_all_ranks
from torch import Tensor, nn
from torch.optim import SGD, Adam

from hvlike.errors import MismatchError, UsageError
from hvlike.optim import ZeroRedundancyOptimizer


def parameters(count: int = 2) -> list[Tensor]:
    return [torch.ones(3, requires_grad=True) for _ in range(count)]


@pytest.mark.parametrize(
    ("params", "error", "text"),
    [
        ([], ValueError, "ZeroRedundancyOptimizer got an empty parameter list"),
        (torch.ones(3), TypeError, "should be an iterable of Tensors, but got torch.FloatTensor"),
        (1.2, TypeError, "should be an iterable of Tensors or dicts, but got float"),
        ([torch.ones(3), 42], TypeError, "should be an iterable of Tensors or dicts"),
        ([{"lr": 0.1}], ValueError, "must have a 'params' key"),
        ([torch.ones(2), torch.ones(2, dtype=torch.float64)], ValueError, "FloatTensor and torch.DoubleTensor"),
        ([{"params": [torch.ones(2), torch.ones(2).bfloat16()]}], ValueError, "the same dense type"),
        ([torch.eye(2).to_sparse()], ValueError, "same dense type for all parameters but got torch.sparse.FloatTensor"),
        ([torch.ones(2), torch.eye(2).to_sparse()], ValueError, "the same dense type"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_what_are_no_parameters_is_refused(hvd: ModuleType, params: Any, error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        ZeroRedundancyOptimizer(params, optimizer_class=SGD, lr=0.1)


@pytest.mark.parametrize("optimizer_class", ["SGD", torch.nn.Linear, None, 7])
def test_an_optimizer_class_is_wanted(hvd: ModuleType, optimizer_class: Any) -> None:
    with pytest.raises(UsageError, match=r"must be a subclass of torch\.optim\.Optimizer"):
        ZeroRedundancyOptimizer(parameters(), optimizer_class, lr=0.1)


def test_two_owners_of_the_reduction_are_refused(hvd: ModuleType) -> None:
    with pytest.raises(UsageError, match="Choose one"):
        ZeroRedundancyOptimizer(parameters(), SGD, overlap_with_ddp=True, reduce_gradients=True, lr=0.1)


def test_a_list_and_a_generator_make_one_group(hvd: ModuleType) -> None:
    for params in (parameters(3), (each for each in parameters(3))):
        optimizer = ZeroRedundancyOptimizer(params, SGD, lr=0.1)
        assert len(optimizer.param_groups) == len(optimizer.optim.param_groups) == 1
        assert len(optimizer.param_groups[0]["params"]) == 3
        assert isinstance(optimizer, torch.optim.Optimizer)


def test_two_dicts_make_two_groups_inside_and_outside(hvd: ModuleType) -> None:
    groups: list[dict[str, Any]] = [{"params": iter(parameters()), "lr": 0.1}, {"params": parameters(1)[0]}]
    optimizer = ZeroRedundancyOptimizer(groups, Adam, lr=0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]
    assert [group["lr"] for group in optimizer.optim.param_groups] == [0.1, 0.5]
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)


def test_sizes_are_balanced(hvd: ModuleType) -> None:
    sizes = [size for size in (9, 7, 5, 3) for _ in range(hvd.size())]
    optimizer = ZeroRedundancyOptimizer([torch.rand(size, 1) for size in sizes], SGD, lr=0.1)
    assert sum(each.numel() for each in optimizer.optim.param_groups[0]["params"]) == 24


def test_a_group_added_later_lands_where_it_evens_out(hvd: ModuleType) -> None:
    size = hvd.size()
    # All ranks hold 9 but the last, which holds 6.
    params = [torch.rand(count, 1) for count in [9] * (size - 1) + [6]]
    optimizer = ZeroRedundancyOptimizer(params, SGD, lr=0.1)
    optimizer.add_param_group({"params": [torch.rand(3, 1)], "lr": 0.7})
    held = sum(each.numel() for group in optimizer.optim.param_groups for each in group["params"])
    assert held == 9
    assert len(optimizer.param_groups) == len(optimizer.optim.param_groups) == 2
    assert optimizer.optim.param_groups[1]["lr"] == 0.7


@pytest.mark.parametrize("view", [False, True])
def test_a_group_after_a_large_frozen_parameter(hvd: ModuleType, view: bool) -> None:
    params = [torch.full((size, 1), 0.5) for size in (100, 9, 7, 5, 3)]
    for parameter in params[1:]:
        parameter.requires_grad = True
    optimizer = ZeroRedundancyOptimizer(params[:3], SGD, lr=0.1, parameters_as_bucket_view=view)
    optimizer.add_param_group({"params": params[3:]})
    assert len(optimizer.param_groups) == len(optimizer.optim.param_groups) == 2
    for parameter in params:
        parameter.grad = torch.ones_like(parameter)
    before = [parameter.detach().clone() for parameter in params]
    optimizer.step()
    for parameter, start in zip(params, before, strict=True):
        torch.testing.assert_close(parameter.detach(), start - 0.1)


def test_a_group_of_another_type_changes_nothing(hvd: ModuleType) -> None:
    optimizer = ZeroRedundancyOptimizer(parameters(), SGD, lr=0.1)
    with pytest.raises(UsageError, match="the same dense type"):
        optimizer.add_param_group({"params": [torch.ones(2).double()]})
    assert len(optimizer.param_groups) == len(optimizer.optim.param_groups) == 1


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("different", "text"),
    [
        ({"shape": 4}, r"shape of parameter 0 of group 0 .* \(3,\).* \(4,\)"),
        ({"optimizer_class": Adam}, "optimizer_class"),
        ({"reduce_gradients": True}, "reduce_gradients"),
        ({"parameters_as_bucket_view": True}, "parameters_as_bucket_view"),
    ],
)
def test_ranks_that_differ_are_told_so_on_every_rank(hvd: ModuleType, different: dict[str, Any], text: str) -> None:
    mine: dict[str, Any] = dict(different) if hvd.rank() == hvd.size() - 1 else {}
    params = [torch.ones(mine.pop("shape", 3), requires_grad=True)]
    with pytest.raises(MismatchError, match=text):
        ZeroRedundancyOptimizer(params, **{"optimizer_class": SGD, "lr": 0.1, **mine})
    assert int(hvd.allreduce(torch.ones(1), op=hvd.Sum)) == hvd.size()


def made() -> list[nn.Parameter]:
    base = torch.ones(12)
    return [nn.Parameter(base[:8]), nn.Parameter(torch.ones(9)), nn.Parameter(base[4:])]


def step(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], factor: float) -> None:
    optimizer.zero_grad()
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, factor * (number + 1))
    optimizer.step()


def values(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [each.detach() for each in parameters]


@pytest.mark.parametrize("reduces", [True, False])
def test_as_the_plain_optimizer(hvd: ModuleType, reduces: bool) -> None:
    ours, plain = made(), made()
    optimizer = ZeroRedundancyOptimizer(ours, SGD, lr=0.1, momentum=0.9, reduce_gradients=reduces)
    reference = SGD(plain, lr=0.1, momentum=0.9)
    for number in range(3):
        step(optimizer, ours, number + 1)
        step(reference, plain, number + 1)
    for mine, its in zip(values(ours), values(plain), strict=True):
        torch.testing.assert_close(mine, its)
    assert same_on_all_ranks(values(ours))


@pytest.mark.mpi(min_size=2)
def test_in_a_group_added_later(hvd: ModuleType) -> None:
    ours, plain = made(), made()
    optimizer = ZeroRedundancyOptimizer(ours[:2], SGD, lr=0.1, reduce_gradients=True)
    optimizer.add_param_group({"params": ours[2:]})
    reference = SGD(plain, lr=0.1)
    step(optimizer, ours, 1)
    step(reference, plain, 1)
    for mine, its in zip(values(ours), values(plain), strict=True):
        torch.testing.assert_close(mine, its)


def test_views_of_a_bucket_would_take_them_apart(hvd: ModuleType) -> None:
    with pytest.raises(UsageError, match="parameters number 0 and 2 share memory"):
        ZeroRedundancyOptimizer(made(), SGD, lr=0.1, parameters_as_bucket_view=True)


@pytest.mark.mpi(min_size=2)
def test_adasum_would_count_changes_twice(hvd: ModuleType) -> None:
    parameters = made()
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=0.1), op=hvd.Adasum)
    with pytest.raises(UsageError, match=r"'noname\.0\.0' and 'noname\.0\.2' share memory"):
        step(optimizer, parameters, 1)


@pytest.mark.parametrize("reduces", [True, False])
@pytest.mark.parametrize("view", [True, False])
def test_a_parameter_gets_memory_of_another_shape(hvd: ModuleType, reduces: bool, view: bool) -> None:
    """Alike on all ranks, between two steps."""
    parameter, other = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(3))
    optimizer = ZeroRedundancyOptimizer(
        [parameter, other], SGD, lr=0.1, reduce_gradients=reduces, parameters_as_bucket_view=view
    )
    for length in (4, 6, 2, 2):
        if length != len(parameter):
            parameter.data = torch.ones(length)
        before = float(parameter.detach()[0])
        optimizer.zero_grad()
        for each in (parameter, other):
            each.grad = torch.ones_like(each)
        optimizer.step()
        torch.testing.assert_close(parameter.detach(), torch.full((length,), before - 0.1))
    assert same_on_all_ranks([parameter.detach(), other.detach()])
