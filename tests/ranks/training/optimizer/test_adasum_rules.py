"""op=Adasum: what is allowed when, what happens to ranks that skip, fail or have nothing, and what is refused."""

import copy
import pickle
from types import ModuleType
from typing import Any

import pytest
import torch
from support.training.problem import largest_difference, loss_of, make_model, same_on_all_ranks, share, whole_batch
from torch import nn

from hvlike import DistributedOptimizer, clip_grad_norm_
from hvlike.errors import MismatchError, UsageError

pytestmark = pytest.mark.differs_by_ranks(2, 4)


def make(hvd: ModuleType, **options: Any) -> tuple[nn.Module, Any]:
    model = make_model()
    wrapped = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, DistributedOptimizer(wrapped, named_parameters=model.named_parameters(), op=hvd.Adasum, **options)


def backward(hvd: ModuleType, model: nn.Module, step: int = 0) -> None:
    dtype = next(model.parameters()).dtype
    inputs, targets = share(hvd, whole_batch(step))
    loss_of(model, (inputs.to(dtype), targets.to(dtype))).backward()


def train(hvd: ModuleType, model: nn.Module, optimizer: Any, steps: int = 2) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        backward(hvd, model, step)
        optimizer.step()


def check_that_training_goes_on(hvd: ModuleType, model: nn.Module, optimizer: Any) -> None:
    before = copy.deepcopy(model)
    train(hvd, model, optimizer)
    assert same_on_all_ranks(model.parameters())
    assert largest_difference(model.parameters(), before.parameters()) > 0


def test_gradients_and_momentum_stay_those_of_the_rank(hvd: ModuleType) -> None:
    model, optimizer = make(hvd)
    backward(hvd, model)
    gradient = model.get_parameter("0.weight").grad.clone()
    optimizer.step()
    assert torch.equal(model.get_parameter("0.weight").grad, gradient)
    assert torch.equal(optimizer.state[model.get_parameter("0.weight")]["momentum_buffer"], gradient)
    assert same_on_all_ranks(model.parameters())


def test_zero_grad_may_come_between_backward_and_step(hvd: ModuleType) -> None:
    model, optimizer = make(hvd)
    before = copy.deepcopy(model)
    backward(hvd, model)
    optimizer.zero_grad()
    optimizer.step()
    assert largest_difference(model.parameters(), before.parameters()) == 0
    check_that_training_goes_on(hvd, model, optimizer)


def test_synchronize_does_nothing_and_local_gradients_may_be_clipped(hvd: ModuleType) -> None:
    model, optimizer = make(hvd)
    backward(hvd, model)
    gradient = model.get_parameter("0.weight").grad.clone()
    optimizer.synchronize()
    assert torch.equal(model.get_parameter("0.weight").grad, gradient)
    clip_grad_norm_(optimizer, 1e-3)
    assert sum(float(each.grad.square().sum()) for each in model.parameters()) ** 0.5 == pytest.approx(1e-3, rel=1e-2)
    optimizer.step()
    assert same_on_all_ranks(model.parameters())


def test_skip_synchronize_is_refused_with_advice(hvd: ModuleType) -> None:
    model, optimizer = make(hvd)
    with pytest.raises(UsageError, match=r"not supported with op=hvd.Adasum.*Call optimizer.step\(\) outside of it"):
        with optimizer.skip_synchronize():
            pass
    check_that_training_goes_on(hvd, model, optimizer)


def test_passes_under_no_sync_add_up_and_a_step_inside_is_refused(hvd: ModuleType) -> None:
    model, optimizer = make(hvd)
    with optimizer.no_sync():
        backward(hvd, model)
        with pytest.raises(UsageError, match=r"optimizer.step\(\) was called inside optimizer.no_sync\(\)"):
            optimizer.step()
    backward(hvd, model, 1)
    optimizer.step()
    assert same_on_all_ranks(model.parameters())


def test_a_rank_without_a_backward_pass_takes_part(hvd: ModuleType) -> None:
    model, optimizer = make(hvd)
    plain = make_model()
    if hvd.rank() == 0:
        backward(hvd, model)
    optimizer.step()
    # The others changed nothing, so that the change of rank 0 is that of all.
    loss_of(plain, share_of_first(hvd)).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9).step()
    assert largest_difference(model.parameters(), plain.parameters()) < 1e-6
    assert same_on_all_ranks(model.parameters())


def share_of_first(hvd: ModuleType) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = whole_batch()
    return inputs[:: hvd.size()], targets[:: hvd.size()]


@pytest.mark.mpi(min_size=2)
def test_a_rank_whose_step_fails_takes_over_what_the_others_did(hvd: ModuleType) -> None:
    model, optimizer = make(hvd)
    backward(hvd, model)
    failing = hvd.rank() == hvd.size() - 1

    def break_off(*_: object) -> None:
        if failing:
            raise ArithmeticError("no step today")

    hook = optimizer.register_step_pre_hook(break_off)
    if failing:
        with pytest.raises(ArithmeticError):
            optimizer.step()
    else:
        optimizer.step()
    hook.remove()
    assert same_on_all_ranks(model.parameters())
    assert largest_difference(model.parameters(), make_model().parameters()) > 0
    check_that_training_goes_on(hvd, model, optimizer)


def test_the_loss_of_a_closure_is_that_of_the_rank(hvd: ModuleType) -> None:
    _, optimizer = make(hvd)
    assert optimizer.step(lambda: float(hvd.rank())) == float(hvd.rank())


def test_sparse_gradients(hvd: ModuleType) -> None:
    torch.manual_seed(1)
    embedding = nn.Embedding(12, 4, sparse=True)
    before = embedding.weight.detach().clone()
    optimizer = DistributedOptimizer(torch.optim.SGD(embedding.parameters(), lr=0.5), op=hvd.Adasum)
    # Every rank reaches a row of its own: changes are orthogonal and add up.
    embedding(torch.tensor([hvd.rank()])).sum().backward()
    optimizer.step()
    expected = before.clone()
    expected[: hvd.size()] -= 0.5
    torch.testing.assert_close(embedding.weight.detach(), expected)
    assert embedding.weight.grad.is_sparse


def test_parameters_that_come_go_and_change(hvd: ModuleType) -> None:
    model, optimizer = make(hvd)
    train(hvd, model, optimizer)
    frozen = model.get_parameter("2.weight").requires_grad_(False)
    before = frozen.detach().clone()
    check_that_training_goes_on(hvd, model, optimizer)
    assert torch.equal(frozen, before)
    frozen.requires_grad_(True)
    extra = nn.Parameter(torch.zeros(3))
    optimizer.add_param_group({"params": [extra]})
    extra.grad = torch.full((3,), float(hvd.rank() + 1))
    backward(hvd, model)
    optimizer.step()
    assert same_on_all_ranks([*model.parameters(), extra])
    assert not torch.equal(frozen, before)
    model.double()
    optimizer.state.clear()
    check_that_training_goes_on(hvd, model, optimizer)


def test_a_frozen_parameter_with_a_gradient_left_does_not_part_the_ranks(hvd: ModuleType) -> None:
    model, optimizer = make(hvd)
    backward(hvd, model)
    model.get_parameter("0.weight").requires_grad_(False)
    optimizer.step()
    assert same_on_all_ranks(model.parameters())


@pytest.mark.mpi(min_size=2)
def test_a_frozen_parameter_with_a_gradient_on_one_rank_only(hvd: ModuleType) -> None:
    """Frozen for good: the ranks agree on what is reduced, whoever has a gradient left."""
    model, optimizer = make(hvd)
    train(hvd, model, optimizer)
    frozen = model.get_parameter("0.weight")
    frozen.requires_grad_(False)
    for step in range(4):
        frozen.grad = torch.ones_like(frozen) if hvd.rank() == 1 else None
        backward(hvd, model, step)
        optimizer.step()
        assert same_on_all_ranks(model.parameters())
        optimizer.zero_grad(set_to_none=False)


def test_copies_and_pickles_go_on_alike(hvd: ModuleType) -> None:
    model, optimizer = make(hvd)
    train(hvd, model, optimizer)
    copied_model, copied = copy.deepcopy((model, optimizer))
    loaded_model, loaded = pickle.loads(pickle.dumps((model, optimizer)))
    for each, its in ((model, optimizer), (copied_model, copied), (loaded_model, loaded)):
        train(hvd, each, its)
    for other in (copied_model, loaded_model):
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_the_state_dict_is_that_of_the_wrapped_optimizer(hvd: ModuleType) -> None:
    model, optimizer = make(hvd)
    train(hvd, model, optimizer)
    plain = torch.optim.SGD(make_model().parameters(), lr=1.0)
    plain.load_state_dict(optimizer.state_dict())
    assert plain.param_groups[0]["lr"] == 0.1


@pytest.mark.mpi(min_size=2)
def test_models_that_differ_fail_on_every_rank_and_change_nothing(hvd: ModuleType) -> None:
    model = nn.Linear(3 if hvd.rank() == 0 else 4, 2)
    before = copy.deepcopy(model)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Adasum)
    model(torch.ones(1, model.in_features)).sum().backward()
    with pytest.raises(MismatchError, match="Mismatched shapes of parameter 0"):
        optimizer.step()
    assert largest_difference(model.parameters(), before.parameters()) == 0
    model, optimizer = make(hvd)
    check_that_training_goes_on(hvd, model, optimizer)


def test_complex_parameters_are_refused(hvd: ModuleType) -> None:
    parameter = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    optimizer = DistributedOptimizer(torch.optim.SGD([parameter], lr=0.1), op=hvd.Adasum)
    parameter.grad = torch.ones_like(parameter).detach()
    with pytest.raises(UsageError, match=r"parameter 'noname.0.0': op Adasum is not defined on dtype complex64"):
        optimizer.step()


def test_a_predivide_factor_is_refused(hvd: ModuleType) -> None:
    with pytest.raises(UsageError, match="gradient_predivide_factor not supported with op != Average, got op Adasum"):
        make(hvd, gradient_predivide_factor=2.0)
