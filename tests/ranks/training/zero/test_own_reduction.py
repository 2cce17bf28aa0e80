"""reduce_gradients=True: the optimizer averages gradients itself, each on the rank that owns its parameter."""

from types import ModuleType
from typing import Any

import pytest
import torch
from support.training.problem import same_on_all_ranks
from support.training.zero_problem import batch, difference, loss_of, net
from torch import Tensor, nn
from torch.optim import SGD, Adam

from hvlike.errors import UsageError
from hvlike.optim import ZeroRedundancyOptimizer


def share(hvd: ModuleType, inputs: Tensor) -> Tensor:
    """This rank's rows."""
    return inputs[hvd.rank() :: hvd.size()]


@pytest.mark.parametrize(
    ("view", "passes", "clipping"),
    [(False, 1, None), (True, 2, None), (False, 2, 2.0), (True, 1, 2.0), (False, 1, 1.0), (True, 2, float("inf"))],
)
def test_the_same_as_one_process_with_the_whole_batch(
    hvd: ModuleType, view: bool, passes: int, clipping: float | None
) -> None:
    ours, plain = net(), net()
    keywords: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
    optimizer = ZeroRedundancyOptimizer(
        ours.parameters(), SGD, parameters_as_bucket_view=view, reduce_gradients=True, **keywords
    )
    reference = SGD(plain.parameters(), **keywords)
    for step in range(3):
        norms = []
        for model, stepper in ((ours, optimizer), (plain, reference)):
            stepper.zero_grad()
            for part in batch(step, 24).chunk(passes):
                (loss_of(model, share(hvd, part) if model is ours else part) / passes).backward()
            if clipping is not None and model is ours:
                norms.append(hvd.clip_grad_norm_(optimizer, 0.01, clipping))
            elif clipping is not None:
                norms.append(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01, clipping))
            stepper.step()
        if norms:
            torch.testing.assert_close(*norms, rtol=1e-5, atol=1e-7)
    assert difference(ours, plain) < 1e-6
    assert same_on_all_ranks(ours.parameters())


@pytest.mark.mpi(min_size=2)
def test_each_rank_keeps_the_gradients_of_its_share(hvd: ModuleType) -> None:
    model = net()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, reduce_gradients=True, lr=0.1)
    loss_of(model, batch(hvd.rank())).backward()
    optimizer.step()
    own = {parameter for group in optimizer.optim.param_groups for parameter in group["params"]}
    for parameter in model.parameters():
        assert (parameter.grad is not None) == (parameter in own)


def test_a_closure(hvd: ModuleType) -> None:
    ours, plain = net(), net()
    optimizer = ZeroRedundancyOptimizer(ours.parameters(), SGD, reduce_gradients=True, lr=0.1)
    reference = SGD(plain.parameters(), lr=0.1)

    def evaluate(model: nn.Module, stepper: torch.optim.Optimizer, inputs: Tensor) -> float:
        def closure() -> float:
            stepper.zero_grad()
            loss = loss_of(model, inputs)
            loss.backward()
            return loss.item()

        return stepper.step(closure)  # type: ignore[return-value]

    for step in range(2):
        mine = evaluate(ours, optimizer, share(hvd, batch(step)))
        whole = evaluate(plain, reference, batch(step))
        assert hvd.allreduce(torch.tensor(mine)).item() == pytest.approx(whole)
    assert difference(ours, plain) < 1e-6


def test_a_rank_without_a_gradient_counts_as_zeros(hvd: ModuleType) -> None:
    used, unused = torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)
    optimizer = ZeroRedundancyOptimizer([used, unused], SGD, reduce_gradients=True, lr=0.1, weight_decay=0.5)
    if hvd.rank() == 0:
        used.sum().backward()
    optimizer.step()
    torch.testing.assert_close(used.detach(), torch.full((3,), 1 - 0.1 * (1 / hvd.size() + 0.5)))
    # As with the plain optimizer.
    assert torch.equal(unused.detach(), torch.ones(2))


@pytest.mark.mpi(min_size=2)
def test_backward_between_clipping_and_step_is_refused(hvd: ModuleType) -> None:
    model = net()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, reduce_gradients=True, lr=0.1)
    loss_of(model, batch(0)).backward()
    hvd.clip_grad_norm_(optimizer, 1.0)
    loss_of(model, batch(0)).backward()
    with pytest.raises(UsageError, match="a backward pass ran after the gradients were reduced"):
        optimizer.step()
    optimizer.zero_grad()
    loss_of(model, batch(0)).backward()
    optimizer.step()
    assert same_on_all_ranks(model.parameters())


def test_clipping_is_for_the_owner_of_the_reduction(hvd: ModuleType) -> None:
    optimizer = ZeroRedundancyOptimizer(net().parameters(), SGD, lr=0.1)
    with pytest.raises(UsageError, match=r"use torch\.nn\.utils\.clip_grad_norm_"):
        hvd.clip_grad_norm_(optimizer, 1.0)
    optimizer = ZeroRedundancyOptimizer(net().parameters(), SGD, reduce_gradients=True, lr=0.1)
    with pytest.raises(UsageError, match="norm_type must be > 0"):
        hvd.clip_grad_norm_(optimizer, 1.0, 0)


def test_a_norm_that_is_not_finite(hvd: ModuleType) -> None:
    model = net()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, reduce_gradients=True, lr=0.1)
    before = [each.detach().clone() for each in model.parameters()]
    (loss_of(model, batch(0)) * (float("inf") if hvd.rank() == hvd.size() - 1 else 1.0)).backward()
    with pytest.raises(RuntimeError, match="is non-finite, so it cannot be clipped"):
        hvd.clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=True)
    optimizer.zero_grad()
    assert all(torch.equal(each.detach(), start) for each, start in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("clipping", [False, True])
def test_a_scaler_skips_on_all_ranks_or_on_none(hvd: ModuleType, clipping: bool) -> None:
    ours, plain = net(), net()
    optimizer = ZeroRedundancyOptimizer(ours.parameters(), Adam, reduce_gradients=True, lr=0.01, eps=1e-3)
    reference = Adam(plain.parameters(), lr=0.01, eps=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    for step in range(4):
        overflows = step == 1
        for model, stepper in ((ours, optimizer), (plain, reference)):
            if model is plain and overflows:
                continue
            stepper.zero_grad()
            loss = loss_of(model, share(hvd, batch(step)) if model is ours else batch(step))
            if model is plain:
                loss.backward()
                if clipping:
                    torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
                stepper.step()
                continue
            scaled = scaler.scale(loss)
            if overflows and hvd.rank() == hvd.size() - 1:
                scaled = scaled * float("inf")
            scaled.backward()
            if clipping:
                scaler.unscale_(optimizer)
                hvd.clip_grad_norm_(optimizer, 0.01)
            scaler.step(optimizer)
            scaler.update()
    assert scaler.get_scale() == 4.0
    assert difference(ours, plain) < 1e-5
    assert same_on_all_ranks(ours.parameters())


def test_more_ranks_than_parameters(hvd: ModuleType) -> None:
    x = torch.ones(5, requires_grad=True)
    optimizer = ZeroRedundancyOptimizer([x], Adam, reduce_gradients=True, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale((x * (hvd.rank() + 1)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert same_on_all_ranks([x])
    torch.testing.assert_close(x.detach(), torch.full((5,), 0.8), rtol=1e-4, atol=1e-4)
