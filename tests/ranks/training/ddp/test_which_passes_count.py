"""Only passes that add to `.grad` reduce: torch.autograd.grad and torch.func leave it, and the next forward, alone."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from support.training.ddp_models import assert_same, gradients, inputs, share
from support.training.problem import same_on_all_ranks
from torch import Tensor, nn

from hvlike.errors import DataParallelError
from hvlike.nn import DistributedDataParallel

pytestmark = pytest.mark.differs_by_overlap

Pass = Callable[[nn.Module, nn.Module, Tensor], object]


def make() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def of_parameters(model: nn.Module, module: nn.Module, batch: Tensor) -> object:
    return torch.autograd.grad(loss_of(model, batch), list(module.parameters()))


def of_inputs(model: nn.Module, _: nn.Module, batch: Tensor) -> object:
    batch = batch.clone().requires_grad_()
    return torch.autograd.grad(model(batch).sum(), batch)


def added_to_inputs(model: nn.Module, _: nn.Module, batch: Tensor) -> object:
    batch = batch.clone().requires_grad_()
    loss_of(model, batch).backward(inputs=[batch])
    return batch.grad


def of_a_function(model: nn.Module, module: nn.Module, batch: Tensor) -> object:
    parameters = {f"module.{name}": each.detach() for name, each in module.named_parameters()}

    def loss(values: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, values, (batch,)).square().mean()

    return torch.func.grad(loss)(parameters)


def per_sample(model: nn.Module, module: nn.Module, batch: Tensor) -> object:
    parameters = {f"module.{name}": each.detach() for name, each in module.named_parameters()}

    def loss(values: dict[str, Tensor], sample: Tensor) -> Tensor:
        return torch.func.functional_call(model, values, (sample,)).square().mean()

    return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, batch)


def forward_mode(model: nn.Module, _: nn.Module, batch: Tensor) -> object:
    return torch.func.jvp(model, (batch,), (torch.ones_like(batch),))


def hessian_vector_product(model: nn.Module, module: nn.Module, batch: Tensor) -> object:
    parameters = list(module.parameters())
    first = torch.autograd.grad(loss_of(model, batch), parameters, create_graph=True)
    return torch.autograd.grad(sum(each.sum() for each in first), parameters, allow_unused=True)


def added_to_other_tensors(model: nn.Module, module: nn.Module, batch: Tensor) -> object:
    values = {f"module.{name}": each.detach().clone().requires_grad_() for name, each in module.named_parameters()}
    torch.func.functional_call(model, values, (batch,)).square().mean().backward()
    return [each.grad for each in values.values()]


def of_a_function_s_input(model: nn.Module, _: nn.Module, batch: Tensor) -> object:
    return torch.autograd.functional.jacobian(lambda given: model(given).sum(), batch)


PASSES = [
    of_parameters,
    of_inputs,
    added_to_inputs,
    of_a_function,
    per_sample,
    forward_mode,
    hessian_vector_product,
    added_to_other_tensors,
    of_a_function_s_input,
]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # In torch.func.jvp
@pytest.mark.parametrize("option", ["", "find_unused_parameters", "static_graph", "hook"])
@pytest.mark.parametrize("run", PASSES)
def test_passes_that_add_nothing(hvd: ModuleType, run: Pass, option: str) -> None:
    """Their results are this rank's own, on one rank alone too, between steps that reduce as ever."""
    module, alone = make(), make()
    ddp = DistributedDataParallel(module, **({option: True} if option not in ("", "hook") else {}))
    if option == "hook":
        ddp.register_comm_hook(None, lambda _, bucket: hvd.allreduce_async(bucket.buffer(), name=f"{bucket.index()}"))
    for step in range(3):
        ddp.zero_grad()
        alone.zero_grad()
        batch = share(hvd, inputs(step))
        if step != 1 or hvd.rank() == 0:
            torch.testing.assert_close(run(ddp, module, batch), run(Wrapped(alone), alone, batch))
        assert gradients(module) == [None] * 4
        loss_of(ddp, batch).backward()
        loss_of(alone, inputs(step)).backward()
        assert_same(gradients(module), gradients(alone))


class Wrapped(nn.Module):
    """Names parameters as DistributedDataParallel does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


def test_averages_made_by_hand(hvd: ModuleType) -> None:
    module, alone = make(), make()
    ddp = DistributedDataParallel(module)
    for step in range(2):
        found = torch.autograd.grad(loss_of(ddp, share(hvd, inputs(step))), list(module.parameters()))
        means = hvd.grouped_allreduce(list(found), name="means")
        assert_same(means, torch.autograd.grad(loss_of(alone, inputs(step)), list(alone.parameters())))
    assert gradients(module) == [None] * 4


def test_meta_learning(hvd: ModuleType) -> None:
    """The outer pass comes through a gradient of the forward, and so reduces."""
    module, alone = make(), make()
    ddp = DistributedDataParallel(module)
    for step in range(2):
        for each in (module, alone):
            each.zero_grad()
        for model, inner, batch in ((alone, alone, inputs(step)), (ddp, module, share(hvd, inputs(step)))):
            names = [name for name, _ in inner.named_parameters()]
            # One batch for the inner step, so that the outer loss is an average over samples.
            first = torch.autograd.grad(loss_of(model, inputs(9)), list(inner.parameters()), create_graph=True)
            adapted = {
                name: each - 0.1 * gradient
                for name, each, gradient in zip(names, inner.parameters(), first, strict=True)
            }
            torch.func.functional_call(inner, adapted, (batch,)).square().mean().backward()
        assert_same(gradients(module), gradients(alone))


@pytest.mark.parametrize("find_unused", [False, True])
def test_an_outer_pass_through_parameters_that_stand_in(hvd: ModuleType, find_unused: bool) -> None:
    """The wrapper is called with adapted parameters; the pass reaches its own through them."""
    module, alone = make(), make()
    ddp = DistributedDataParallel(module, find_unused_parameters=find_unused)
    for step in range(3):
        for model, inner, batch in (
            (Wrapped(alone), alone, inputs(step)),
            (ddp, module, share(hvd, inputs(step))),
        ):
            inner.zero_grad()
            named = {f"module.{name}": each for name, each in inner.named_parameters()}
            first = torch.autograd.grad(loss_of(inner, inputs(9)), list(named.values()), create_graph=True)
            adapted = {name: each - 0.1 * slope for (name, each), slope in zip(named.items(), first, strict=True)}
            torch.func.functional_call(model, adapted, (batch,)).square().mean().backward()
        assert_same(gradients(module), gradients(alone))


def test_a_penalty_on_gradients_of_inputs(hvd: ModuleType) -> None:
    module, alone = make(), make()
    ddp = DistributedDataParallel(module)
    for step in range(3):
        for model, batch in ((alone, inputs(step)), (ddp, share(hvd, inputs(step)))):
            model.zero_grad()
            given = batch.clone().requires_grad_()
            (slope,) = torch.autograd.grad(model(given).sum(), given, create_graph=True)
            (loss_of(model, batch) + slope.square().sum(1).mean()).backward()
        assert_same(gradients(module), gradients(alone))


def test_a_pass_that_reaches_no_parameter_on_one_rank(hvd: ModuleType) -> None:
    """It adds to tensors before the module, as the passes of the others add to its parameters: it counts."""

    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor, used: bool) -> Tensor:
            return self.layer(x) if used else x * 1.0

    ddp = DistributedDataParallel(Optional(), find_unused_parameters=True)
    for step in range(3):
        ddp.zero_grad()
        used = hvd.rank() == step % hvd.size()
        ddp(inputs(step).requires_grad_(), used).sum().backward()
        assert same_on_all_ranks(gradients(ddp))
    ddp.zero_grad()
    ddp(inputs().requires_grad_(), False).sum().backward()
    assert gradients(ddp) == [None, None]


@pytest.mark.parametrize("frozen", [False, True])
def test_a_pass_that_fails_before_it_reaches_a_parameter(hvd: ModuleType, frozen: bool) -> None:
    """On one rank: the others are not left waiting, and it complains at its next forward."""
    module = make()
    ddp = DistributedDataParallel(module)
    if frozen:
        # The last layer still holds a gradient, and is reduced once more.
        loss_of(ddp, inputs()).backward()
        module[-1].requires_grad_(False)
    output = ddp(inputs())
    if hvd.rank() == 0:
        module[2].register_full_backward_pre_hook(fail := Failing())
        output = ddp(inputs())
        with pytest.raises(ZeroDivisionError):
            output.sum().backward()
        fail.active = False
        with pytest.raises(DataParallelError, match="interrupted by an error"):
            ddp(inputs())
    else:
        output.sum().backward()
    ddp.zero_grad()
    loss_of(ddp, inputs()).backward()
    assert same_on_all_ranks([each for each in gradients(module) if each is not None])


def test_a_function_of_torch_func_begins_after_a_pass_that_failed(hvd: ModuleType) -> None:
    """What is left of that pass is reduced outside of the transformation, which would take its zeros for its own."""
    module = make()
    ddp = DistributedDataParallel(module)
    loss_of(ddp, inputs()).backward()
    parameters = {name: each.detach() for name, each in ddp.named_parameters()}

    def loss(values: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(ddp, values, (inputs(),)).sum()

    ddp.zero_grad()
    handle = module[2].register_full_backward_pre_hook(Failing())
    with pytest.raises(ZeroDivisionError):
        ddp(inputs()).sum().backward()
    handle.remove()
    with pytest.raises(DataParallelError, match="interrupted by an error"):
        torch.func.grad(loss)(parameters)
    assert torch.func.grad(loss)(parameters).keys() == parameters.keys()


def test_frozen_between_forward_and_backward(hvd: ModuleType) -> None:
    """It accumulates nothing, so nothing of it is missing."""
    module = make()
    ddp = DistributedDataParallel(module)
    for frozen in (True, False, True):
        ddp.zero_grad()
        output = ddp(inputs())
        module[0].requires_grad_(not frozen)
        output.square().mean().backward()
        assert (module[0].weight.grad is None) == frozen
        assert same_on_all_ranks([each for each in gradients(module) if each is not None])
        module[0].requires_grad_(True)


def test_all_is_frozen_and_only_some_ranks_hold_sums(hvd: ModuleType) -> None:
    """A pass to the inputs reduces the sums of local passes, which do not have to be there on this rank."""
    module = make()
    ddp = DistributedDataParallel(module, find_unused_parameters=True)
    loss_of(ddp, inputs()).backward()
    ddp.zero_grad()
    with ddp.no_sync():
        result = ddp(inputs())
        if hvd.rank() == 0:
            result.sum().backward()
    ddp.requires_grad_(False)
    loss_of(ddp, inputs().requires_grad_()).backward()
    assert same_on_all_ranks([each for each in gradients(module) if each is not None])
    # The sums are used up: what follows reduces nothing.
    if hvd.rank() == 0:
        loss_of(ddp, inputs().requires_grad_()).backward()


class Failing:
    """A hook that fails as long as it is active."""

    active = True

    def __call__(self, *_: object) -> None:
        if self.active:
            raise ZeroDivisionError


@pytest.mark.parametrize("differentiated", [False, True])
def test_a_local_pass_after_a_forward_that_accumulated_nothing(hvd: ModuleType, differentiated: bool) -> None:
    """What a pass does is decided by the forward that it comes through."""
    module = make()
    model = DistributedDataParallel(module)
    own = make()
    batch = share(hvd, inputs(0))
    output = model(batch).square().mean()
    if differentiated:
        torch.autograd.grad(output, list(module.parameters()))
    with model.no_sync():
        loss_of(model, batch).backward()
    loss_of(own, batch).backward()
    assert_same(gradients(module), gradients(own))
    loss_of(model, batch).backward()
    assert same_on_all_ranks([each.grad for each in module.parameters() if each.grad is not None])
