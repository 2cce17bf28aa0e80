"""Parameters that come, go, rest, are shared or are not used: all ranks keep the same model."""

from collections.abc import Callable, Mapping
from types import ModuleType

import pytest
import torch
from support.training.problem import largest_difference, loss_of, make_model, same_on_all_ranks, share, whole_batch
from torch import Tensor, nn

import hvlike
from hvlike.errors import MismatchError
from hvlike.training.distributed_optimizer import DistributedOptimizer
from hvlike.training.gradients.grad_state import Phase


def train_both(hvd: ModuleType, steps: int, change: object = None) -> None:
    """Train distributed and in one process; `change(step, model, optimizer)` is done to both before each step."""
    results = []
    for distributed in (False, True):
        model = make_model()
        optimizer: torch.optim.Optimizer = torch.optim.SGD(list(model.parameters())[:4], lr=0.1, momentum=0.9)
        if distributed:
            optimizer = DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        for step in range(steps):
            optimizer.zero_grad()
            if change is not None:
                change(step, model, optimizer)
            batch = whole_batch(step)
            loss_of(model, share(hvd, batch) if distributed else batch).backward()
            optimizer.step()
        results.append(list(model.parameters()))
    assert largest_difference(*results) < 1e-6
    assert same_on_all_ranks(results[1])


def test_a_group_that_is_added_is_synchronised(hvd: ModuleType) -> None:
    def change(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if step == 2:
            optimizer.add_param_group({"params": list(model.parameters())[4:], "lr": 0.05})

    train_both(hvd, 5, change)


def test_gradients_of_an_added_group_are_reduced_during_backward(hvd: ModuleType) -> None:
    model = make_model()
    optimizer = DistributedOptimizer(torch.optim.SGD(list(model.parameters())[:4], lr=0.1))
    late = list(model.parameters())[4:]
    optimizer.add_param_group({"params": late})
    sum(parameter.sum() for parameter in late).backward()
    assert optimizer.gradients.phase is Phase.REDUCING
    optimizer.step()


def test_requires_grad_switched_off_and_on(hvd: ModuleType) -> None:
    def change(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model.get_parameter("0.weight").requires_grad_(step % 3 != 1)
        model.get_parameter("2.bias").requires_grad_(step > 3)

    train_both(hvd, 7, change)


def test_requires_grad_switched_on_after_the_first_backward_pass(hvd: ModuleType) -> None:
    model = make_model()
    weight = model.get_parameter("0.weight").requires_grad_(False)
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), backward_passes_per_step=2
    )
    loss_of(model, share(hvd, whole_batch())).backward()
    weight.requires_grad_(True)
    loss_of(model, share(hvd, whole_batch(1))).backward()
    optimizer.step()
    assert weight.grad is not None
    assert same_on_all_ranks(model.parameters())


def test_all_parameters_frozen_at_first(hvd: ModuleType) -> None:
    def change(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for parameter in list(model.parameters())[:4]:
            parameter.requires_grad_(step > 0)

    train_both(hvd, 3, change)


def test_a_shared_parameter_used_several_times(hvd: ModuleType) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(6, 6)
    model = nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), layer, nn.Linear(6, 3))
    twin = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    twin[0].load_state_dict(layer.state_dict())
    twin[1].load_state_dict(model[5].state_dict())
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, share(hvd, whole_batch(step))).backward()
        optimizer.step()
        plain.zero_grad()
        chain = nn.Sequential(twin[0], nn.Tanh(), twin[0], nn.Tanh(), twin[0], twin[1])
        loss_of(chain, whole_batch(step)).backward()
        plain.step()
    assert largest_difference(model.parameters(), twin.parameters()) < 1e-6


class Branches(nn.Module):
    """Uses one of two layers, or none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, inputs: Tensor, way: int) -> Tensor:
        return (self.left, self.right)[way % 2](inputs)


def test_parameters_used_on_some_ranks_only_count_as_zero_on_the_others(hvd: ModuleType) -> None:
    model = Branches()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    inputs, targets = whole_batch()
    for step in range(3):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs, hvd.rank() + step), targets).backward()
        optimizer.step()
        assert same_on_all_ranks(model.parameters())
        changed = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
        assert all(changed) or hvd.size() == 1


def test_a_rank_without_any_backward_pass_takes_part(hvd: ModuleType) -> None:
    model = make_model()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    expected = make_model()
    inputs, targets = whole_batch()
    (loss_of(expected, (inputs, targets)) / hvd.size()).backward()
    torch.optim.SGD(expected.parameters(), lr=0.1).step()
    if hvd.rank() == hvd.size() - 1:
        loss_of(model, (inputs, targets)).backward()
    optimizer.step()
    assert largest_difference(model.parameters(), expected.parameters()) < 1e-6
    assert same_on_all_ranks(model.parameters())


def test_gradients_set_by_hand_are_reduced(hvd: ModuleType) -> None:
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0))
    parameter.grad = torch.full((3,), float(hvd.rank()))
    optimizer.step()
    torch.testing.assert_close(parameter.detach(), torch.full((3,), -sum(range(hvd.size())) / hvd.size()))


def test_a_model_converted_after_wrapping(hvd: ModuleType) -> None:
    model = make_model()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        model.to(dtype)
        for step in range(2):
            optimizer.zero_grad()
            inputs, targets = share(hvd, whole_batch(step))
            loss_of(model, (inputs.to(dtype), targets.to(dtype))).backward()
            assert step == 0 or optimizer.gradients.phase is Phase.REDUCING
            optimizer.step()
        assert same_on_all_ranks(parameter.float() for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_parameters_of_other_dtypes(hvd: ModuleType, dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.ones(5, dtype=dtype))
    optimizer = DistributedOptimizer(torch.optim.SGD([parameter], lr=0.5))
    (parameter * (hvd.rank() + 1)).sum().abs().backward()
    optimizer.step()
    mean = sum(rank + 1 for rank in range(hvd.size())) / hvd.size()
    torch.testing.assert_close(parameter.detach(), torch.full((5,), 1 - 0.5 * mean, dtype=dtype), rtol=1e-2, atol=1e-2)


def test_channels_last_and_transposed_parameters(hvd: ModuleType) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2)).to(memory_format=torch.channels_last)
    model[2].weight = nn.Parameter(torch.randn(16, 2).t())
    optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), model.named_parameters())
    torch.manual_seed(hvd.rank())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)).square().sum().backward()
        optimizer.step()
    assert same_on_all_ranks(parameter.contiguous() for parameter in model.parameters())


def test_zero_size_and_scalar_parameters(hvd: ModuleType) -> None:
    empty, scalar = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.tensor(1.0))
    optimizer = DistributedOptimizer(torch.optim.SGD([empty, scalar], lr=1.0))
    (empty.sum() + scalar * hvd.rank()).backward()
    optimizer.step()
    assert scalar.item() == pytest.approx(1.0 - sum(range(hvd.size())) / hvd.size())


def test_lazy_modules(hvd: ModuleType) -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(3))
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    torch.manual_seed(0)
    model(whole_batch()[0])
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, share(hvd, whole_batch(step))).backward()
        assert step == 0 or optimizer.gradients.phase is Phase.REDUCING
        optimizer.step()
    assert same_on_all_ranks(model.parameters())


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("op", [hvlike.Average, hvlike.Adasum])
def test_a_lazy_layer_that_one_rank_has_not_used(hvd: ModuleType, op: int) -> None:
    """All ranks are told; afterwards, used on every rank, it trains."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "lazy": nn.LazyLinear(2)})
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), op=op)
    rows = torch.ones(1, 2)
    loss = model["used"](rows).sum()
    if hvd.rank() != 1:
        loss = loss + model["lazy"](rows).sum()
    loss.backward()
    with pytest.raises(MismatchError, match=r"only one of them has 'lazy\.(weight|bias)'"):
        optimizer.step()
    optimizer.zero_grad()
    model["lazy"](rows)
    hvd.broadcast_parameters(model.state_dict(), 0)
    for _ in range(3):
        optimizer.zero_grad()
        (model["used"](rows) + model["lazy"](rows * hvd.rank())).sum().backward()
        optimizer.step()
    assert same_on_all_ranks(model.parameters())


@pytest.mark.parametrize("settings", [{}, {"HVLIKE_OVERLAP": "1"}])
@pytest.mark.parametrize("op", [hvlike.Average, hvlike.Adasum])
def test_a_lazy_layer_that_is_used_after_some_steps(
    hvd: ModuleType, restarted: Callable[[Mapping[str, str]], None], op: int, settings: dict[str, str]
) -> None:
    restarted(settings)
    torch.manual_seed(0)
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "lazy": nn.LazyLinear(2)})
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), op=op)
    for step in range(6):
        optimizer.zero_grad()
        rows = torch.full((1, 2), 1.0 + hvd.rank())
        loss = model["used"](rows).sum()
        if step > 2:
            loss = loss + model["lazy"](rows).square().sum()
        loss.backward()
        optimizer.step()
        assert same_on_all_ranks(model["used"].parameters())
        assert step < 3 or same_on_all_ranks(model["lazy"].parameters())
