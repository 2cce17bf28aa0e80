"""Parameters that come, go, rest or change their shape: what the optimizer will step on is what is reduced."""

from collections.abc import Callable, Mapping
from types import ModuleType

import pytest
import torch
from support.pretended_nodes import nodes_of
from support.training.problem import largest_difference, loss_of, make_model, same_on_all_ranks, share, whole_batch
from torch import nn
from torch.optim import SGD

import hvlike
from hvlike import DistributedOptimizer
from hvlike.errors import MismatchError, UsageError
from hvlike.training.gradients.grad_state import Phase

pytestmark = pytest.mark.differs_by_overlap


def test_gradients_of_an_added_group_are_reduced_during_backward(hvd: ModuleType) -> None:
    model = make_model()
    optimizer = DistributedOptimizer(torch.optim.SGD(list(model.parameters())[:4], lr=0.1))
    late = list(model.parameters())[4:]
    optimizer.add_param_group({"params": late})
    (sum(parameter.sum() for parameter in late) * hvd.rank()).backward()
    assert optimizer.gradients.phase is Phase.REDUCING
    optimizer.step()
    assert same_on_all_ranks(model.parameters())


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


def test_all_frozen_while_they_hold_sums_of_this_rank(hvd: ModuleType) -> None:
    model = make_model()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for step in range(2):
        with optimizer.no_sync():
            loss_of(model, share(hvd, whole_batch(step))).backward()
    model.requires_grad_(False)
    optimizer.step()
    assert same_on_all_ranks(model.parameters())


def test_a_gradient_set_by_hand_for_a_frozen_parameter(hvd: ModuleType) -> None:
    model = make_model()
    model[0].requires_grad_(False)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for step in range(3):
        optimizer.zero_grad()
        if step:
            model[0].bias.grad = torch.full((16,), float(hvd.rank()))
        loss_of(model, share(hvd, whole_batch(step))).backward()
        optimizer.step()
        assert model[0].weight.grad is None
        assert same_on_all_ranks(model.parameters())
    torch.testing.assert_close(model[0].bias.grad, torch.full((16,), sum(range(hvd.size())) / hvd.size()))


@pytest.mark.parametrize("settings", [{}, {"HVLIKE_OVERLAP": "1"}])
def test_one_set_too_late_is_refused(
    hvd: ModuleType, restarted: Callable[[Mapping[str, str]], None], settings: dict[str, str]
) -> None:
    restarted(settings)
    model = make_model()
    model[0].requires_grad_(False)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, share(hvd, whole_batch(step))).backward()
        if step == 2:
            model[0].bias.grad = torch.full((16,), float(hvd.rank()))
            with pytest.raises(UsageError, match=r"'0\.bias' were set after the first gradient .* had arrived"):
                optimizer.step()
            continue
        optimizer.step()
        assert same_on_all_ranks(model.parameters())


@pytest.mark.mpi(min_size=2)
def test_adasum_with_gradients_that_come_in_the_closure(hvd: ModuleType) -> None:
    """Of a parameter that was frozen without one when step() began."""
    model = make_model()
    model[0].requires_grad_(False)
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), op=hvlike.Adasum
    )

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, share(hvd, whole_batch()))
        loss.backward()
        return loss

    optimizer.step(closure)
    assert same_on_all_ranks(model.parameters())

    def late() -> torch.Tensor:
        model[0].requires_grad_(True)
        return closure()

    with pytest.raises(UsageError, match=r"'0\.weight', '0\.bias'"):
        optimizer.step(late)
    optimizer.step(closure)


@pytest.mark.parametrize("op", [hvlike.Average, hvlike.Adasum])
def test_frozen_while_one_rank_alone_holds_sums(hvd: ModuleType, op: int) -> None:
    """The other ranks have not used the layer; afterwards it rests, untouched by weight decay."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "rare": nn.Linear(2, 2)})
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5), model.named_parameters(), op=op
    )
    start = model["rare"].weight.detach().clone()
    for step in range(4):
        optimizer.zero_grad()
        model.requires_grad_(True)
        if step == 1 and hvd.rank() == 0:
            with optimizer.no_sync():
                model["rare"](torch.ones(1, 2)).sum().backward()
        if step:
            model["rare"].requires_grad_(False)
        model["used"](torch.ones(1, 2)).sum().backward()
        before = model["rare"].weight.detach().clone()
        optimizer.step()
        assert same_on_all_ranks(model.parameters())
        assert torch.equal(before, model["rare"].weight) == (step != 1)
    assert not torch.equal(start, model["rare"].weight)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("ranks_per_node", [1, None])
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_it_is_refused_whatever_came_before(
    hvd: ModuleType, layer: int, ranks_per_node: int | None, steps: int
) -> None:
    with nodes_of(hvd, ranks_per_node):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1), model.named_parameters())
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        model[layer].weight.grad = None
        model[layer].weight.data = torch.ones(2, 3)
        rows = torch.ones(1, 3 if layer == 0 else 2)
        optimizer.zero_grad()
        if layer == 1:
            model.insert(1, nn.ConstantPad1d((0, 1), 1.0))
        with pytest.raises(RuntimeError, match="shape"):
            model(rows).sum().backward()


def test_a_new_parameter_trains_after_it(hvd: ModuleType) -> None:
    model = nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1), model.named_parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.weight.data = torch.ones(1, 3)
    with pytest.raises(RuntimeError, match="shape"):
        model(torch.ones(1, 3)).sum().backward()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="after") == hvd.size()
    model.weight = nn.Parameter(torch.ones(1, 3))
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1), model.named_parameters())
    (model(torch.ones(1, 3)).sum() * (hvd.rank() + 1)).backward()
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), torch.full((1, 3), 1 - 0.1 * (hvd.size() + 1) / 2))
