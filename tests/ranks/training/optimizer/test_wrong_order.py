"""Calls in the wrong order are refused with a text that names cause and fix, and all ranks can go on."""

import warnings
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from support.training.problem import largest_difference, loss_of, make_model, same_on_all_ranks, share, whole_batch
from torch import nn

from hvlike import DistributedOptimizer, clip_grad_norm_
from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.errors import UsageError

pytestmark = pytest.mark.differs_by_overlap


def make(passes: int = 1) -> tuple[nn.Module, DistributedOptimizer]:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=passes
    )


def backward(hvd: ModuleType, model: nn.Module, step: int = 0) -> None:
    loss_of(model, share(hvd, whole_batch(step))).backward()


def check_that_training_goes_on(hvd: ModuleType, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One right step from here equals one right step of a plain optimizer with the whole batch."""
    plain = make_model()
    plain.load_state_dict(model.state_dict())
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    loss_of(plain, whole_batch(5)).backward()
    plain_optimizer.step()
    optimizer.zero_grad()
    backward(hvd, model, 5)
    optimizer.step()
    for mine, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)
    assert same_on_all_ranks(model.parameters())


def test_zero_grad_between_backward_and_step(hvd: ModuleType) -> None:
    model, optimizer = make()
    backward(hvd, model)
    with pytest.raises(UsageError, match=r"zero_grad\(\) was called after loss.backward\(\) but before optimizer.step"):
        optimizer.zero_grad()
    optimizer.step()
    check_that_training_goes_on(hvd, model, optimizer)


def test_gradients_can_be_dropped_as_the_text_says(hvd: ModuleType) -> None:
    model, optimizer = make()
    backward(hvd, model)
    optimizer.synchronize()
    optimizer.zero_grad()
    check_that_training_goes_on(hvd, model, optimizer)


def test_model_zero_grad_between_backward_and_step_names_the_parameters(hvd: ModuleType) -> None:
    model, optimizer = make()
    for _ in range(2):
        backward(hvd, model)
        model.zero_grad()
        with pytest.raises(UsageError, match=r"'0.weight', '0.bias'.* were set to None.*before loss.backward\(\)"):
            optimizer.step()
    check_that_training_goes_on(hvd, model, optimizer)


def test_one_rank_alone_may_do_it_wrong(hvd: ModuleType) -> None:
    model, optimizer = make()
    check_that_training_goes_on(hvd, model, optimizer)
    optimizer.zero_grad()
    backward(hvd, model)
    if hvd.rank() == 0:
        before = [parameter.detach().clone() for parameter in model.parameters()]
        model.zero_grad()
        with pytest.raises(UsageError, match="set to None"):
            optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    else:
        optimizer.synchronize()
    check_that_training_goes_on(hvd, model, optimizer)


def test_replaced_gradients_are_named(hvd: ModuleType) -> None:
    model, optimizer = make()
    backward(hvd, model)
    weight = model.get_parameter("2.weight")
    weight.grad = weight.grad * 0.5
    with pytest.raises(UsageError, match=r"'2.weight' were replaced .* Call optimizer.synchronize\(\) before"):
        optimizer.step()
    check_that_training_goes_on(hvd, model, optimizer)


def halve(parameter: torch.Tensor) -> None:
    parameter.grad.mul_(0.5)


IN_PLACE: dict[str, Callable[[nn.Module], object]] = {
    "clipped": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01),
    "zeroed": lambda model: model.zero_grad(set_to_none=False),
    "scaled": lambda model: [parameter.grad.mul_(2) for parameter in model.parameters()],
}


@pytest.mark.parametrize("change", IN_PLACE)
def test_gradients_changed_in_place_before_they_are_reduced(hvd: ModuleType, change: str) -> None:
    model, optimizer = make()
    backward(hvd, model)
    IN_PLACE[change](model)
    with pytest.raises(UsageError, match=r"'4.bias', .* changed in place on this rank .*hvlike.clip_grad_norm_"):
        optimizer.step()
    check_that_training_goes_on(hvd, model, optimizer)


def test_gradients_may_be_changed_in_hooks_and_after_synchronize(hvd: ModuleType) -> None:
    model, optimizer = make()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(halve)
    backward(hvd, model)
    optimizer.synchronize()
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)
    with optimizer.skip_synchronize():
        optimizer.step()
    assert same_on_all_ranks(model.parameters())


def test_more_backward_passes_than_declared(hvd: ModuleType) -> None:
    model, optimizer = make(passes=2)
    backward(hvd, model)
    backward(hvd, model)
    with pytest.raises(UsageError, match="Gradients were computed more than backward_passes_per_step") as raised:
        backward(hvd, model)
    # No group of passes has ended yet.
    assert "left over" not in str(raised.value)
    optimizer.synchronize()
    optimizer.zero_grad()
    optimizer.set_backward_passes_per_step(1)
    check_that_training_goes_on(hvd, model, optimizer)


@pytest.mark.parametrize(("passes", "left"), [(2, "1 pass is"), (4, "1 to 3 passes are")])
def test_passes_that_an_epoch_has_left_over_are_named(hvd: ModuleType, passes: int, left: str) -> None:
    model, optimizer = make(passes=passes)

    def train_an_epoch() -> None:
        for number in range(1, passes + 2):
            backward(hvd, model)
            if number % passes == 0:
                optimizer.step()
                optimizer.zero_grad()

    train_an_epoch()
    with pytest.raises(UsageError, match=f"If you call step.* after every {passes} passes, {left} left over"):
        train_an_epoch()
    optimizer.synchronize()
    optimizer.zero_grad()
    optimizer.set_backward_passes_per_step(1)
    check_that_training_goes_on(hvd, model, optimizer)


def test_step_under_skip_synchronize_without_synchronize(hvd: ModuleType) -> None:
    model, optimizer = make()
    backward(hvd, model)
    with pytest.raises(UsageError, match=r"have not been reduced. Call optimizer.synchronize\(\) before"):
        with optimizer.skip_synchronize():
            optimizer.step()
    optimizer.step()
    check_that_training_goes_on(hvd, model, optimizer)


def test_step_and_synchronize_inside_no_sync(hvd: ModuleType) -> None:
    model, optimizer = make()
    with optimizer.no_sync():
        backward(hvd, model)
        with pytest.raises(UsageError, match=r"optimizer.step\(\) was called inside optimizer.no_sync\(\)"):
            optimizer.step()
        with pytest.raises(UsageError, match=r"optimizer.synchronize\(\) was called inside optimizer.no_sync\(\)"):
            optimizer.synchronize()
    check_that_training_goes_on(hvd, model, optimizer)


CHANGES: dict[str, Callable[[DistributedOptimizer], object]] = {
    "no_sync": lambda optimizer: optimizer.no_sync().__enter__(),
    "add_param_group": lambda optimizer: optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]}),
    "set_backward_passes_per_step": lambda optimizer: optimizer.set_backward_passes_per_step(3),
}


@pytest.mark.parametrize("call", CHANGES)
def test_changes_between_backward_and_step(hvd: ModuleType, call: str) -> None:
    model, optimizer = make()
    backward(hvd, model)
    with pytest.raises(UsageError, match=rf"optimizer.{call}\(\) was .* after loss.backward\(\) but before"):
        CHANGES[call](optimizer)
    optimizer.step()
    check_that_training_goes_on(hvd, model, optimizer)


def test_a_parameter_that_starts_to_require_a_gradient_between_two_backward_passes(hvd: ModuleType) -> None:
    model, optimizer = make()
    late = model.get_parameter("4.bias")
    # Seen once, so that it has a hook.
    check_that_training_goes_on(hvd, model, optimizer)
    optimizer.zero_grad()
    late.requires_grad_(False)
    backward(hvd, model)
    late.requires_grad_(True)
    optimizer.step()
    assert late.grad is None
    check_that_training_goes_on(hvd, model, optimizer)


TEXT = (
    r"optimizer.step\(\) called without optimizer.skip_synchronize\(\) context after optimizer.synchronize\(\). "
    "This can cause training slowdown."
)


def test_exactly_one_warning_and_gradients_are_reduced_once(hvd: ModuleType) -> None:
    results = []
    for explicit in (False, True):
        model = make_model()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=ReduceOp.SUM)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(3):
                optimizer.zero_grad()
                loss_of(model, share(hvd, whole_batch(step))).backward()
                if explicit:
                    optimizer.synchronize()
                optimizer.step()
        assert [str(each.message).startswith("optimizer.step() called without") for each in caught] == [True] * explicit
        results.append(list(model.parameters()))
    assert largest_difference(*results) == 0.0


def test_the_warning_points_to_the_line_of_the_user(hvd: ModuleType) -> None:
    model = make_model()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer.synchronize()
    with pytest.warns(UserWarning, match=TEXT) as caught:
        optimizer.step()
    assert caught[0].filename == __file__


def test_no_warning_where_the_order_is_right(hvd: ModuleType) -> None:
    model = make_model()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, share(hvd, whole_batch(step))).backward()
        if step % 2:
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            clip_grad_norm_(optimizer, 1.0)
            optimizer.step()
