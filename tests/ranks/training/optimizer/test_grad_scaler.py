"""Mixed precision with a GradScaler: an infinity on one rank skips the step on all, in each way the scaler is used."""

from types import ModuleType
from typing import Any

import pytest
import torch
from support.training.problem import largest_difference, loss_of, make_model, same_on_all_ranks, share, whole_batch
from torch import nn
from torch.amp import GradScaler

from hvlike.collectives.api.objects import allgather_object
from hvlike.training.distributed_optimizer import DistributedOptimizer, clip_grad_norm_

STEPS = 6
BAD_STEPS = (1, 4)
MAX_NORM = 0.05


class CustomScaler(GradScaler):
    """A user's own."""


def step_documented(scaler: GradScaler, optimizer: Any, model: nn.Module) -> None:
    optimizer.synchronize()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    with optimizer.skip_synchronize():
        scaler.step(optimizer)


def step_plain(scaler: GradScaler, optimizer: Any, model: nn.Module) -> None:
    scaler.step(optimizer)


def step_torchs_clipping(scaler: GradScaler, optimizer: Any, model: nn.Module) -> None:
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    scaler.step(optimizer)


def step_our_clipping(scaler: GradScaler, optimizer: Any, model: nn.Module) -> None:
    scaler.unscale_(optimizer)
    clip_grad_norm_(optimizer, MAX_NORM)
    scaler.step(optimizer)


CLIPPING = (step_documented, step_torchs_clipping, step_our_clipping)


def make(fused: bool, distributed: bool) -> tuple[nn.Module, Any]:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3, fused=fused)
    return model, DistributedOptimizer(optimizer) if distributed else optimizer


def reference(fused: bool, clip: bool) -> tuple[nn.Module, float]:
    """One process with the whole batch."""
    model, optimizer = make(fused, distributed=False)
    scaler = GradScaler("cpu", init_scale=1024.0)
    for step in range(STEPS):
        loss = loss_of(model, whole_batch(step)) * (float("inf") if step in BAD_STEPS else 1.0)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
    return model, scaler.get_scale()


@pytest.mark.parametrize("scaler_class", [GradScaler, CustomScaler])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("recipe", [*CLIPPING, step_plain])
def test_an_infinity_on_one_rank_skips_the_step_on_all(
    hvd: ModuleType, recipe: Any, fused: bool, scaler_class: type[GradScaler]
) -> None:
    expected, expected_scale = reference(fused, recipe in CLIPPING)
    model, optimizer = make(fused, distributed=True)
    scaler = scaler_class("cpu", init_scale=1024.0)
    for step in range(STEPS):
        loss = loss_of(model, share(hvd, whole_batch(step)))
        if step in BAD_STEPS and hvd.rank() == hvd.size() - 1:
            loss = loss * float("inf")
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        recipe(scaler, optimizer, model)
        scaler.update()
    assert allgather_object(scaler.get_scale()) == [expected_scale] * hvd.size()
    assert expected_scale == 1024.0 / 2 ** len(BAD_STEPS)
    assert same_on_all_ranks(model.parameters())
    assert largest_difference(model.parameters(), expected.parameters()) < 1e-5


def test_a_skipped_step_leaves_the_next_one_clean_without_zero_grad_of_the_optimizer(hvd: ModuleType) -> None:
    model, optimizer = make(False, distributed=True)
    scaler = GradScaler("cpu", init_scale=8.0)
    for step in range(4):
        model.zero_grad()
        factor = float("nan") if step == 1 and hvd.rank() == 0 else 1.0
        scaler.scale(loss_of(model, share(hvd, whole_batch(step))) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 4.0
    assert same_on_all_ranks(model.parameters())


def test_a_rank_without_a_backward_pass_takes_part(hvd: ModuleType) -> None:
    model, optimizer = make(False, distributed=True)
    scaler = GradScaler("cpu", init_scale=8.0)
    optimizer.zero_grad()
    loss = loss_of(model, share(hvd, whole_batch()))
    scaler.scale(loss)
    if hvd.rank() == 0:
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 8.0
    assert same_on_all_ranks(model.parameters())


def test_a_fused_optimizer_gets_the_scale_and_keeps_nothing_of_it(hvd: ModuleType) -> None:
    model, optimizer = make(True, distributed=True)
    seen: list[float] = []
    optimizer.register_step_pre_hook(lambda wrapped, *_: seen.append(float(wrapped.grad_scale)))
    scaler = GradScaler("cpu", init_scale=16.0)
    scaler.scale(loss_of(model, share(hvd, whole_batch()))).backward()
    scaler.step(optimizer)
    assert seen == [16.0]
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer.wrapped, "found_inf")


def test_a_disabled_scaler_changes_nothing(hvd: ModuleType) -> None:
    model, optimizer = make(False, distributed=True)
    scaler = GradScaler("cpu", enabled=False)
    scaler.scale(loss_of(model, share(hvd, whole_batch()))).backward()
    scaler.step(optimizer)
    scaler.update()
    assert same_on_all_ranks(model.parameters())


def test_other_readers_of_the_groups_do_not_start_a_collective(hvd: ModuleType) -> None:
    model, optimizer = make(False, distributed=True)
    loss_of(model, share(hvd, whole_batch())).backward()
    if hvd.rank() == 0:
        assert optimizer.param_groups[0]["lr"] == 0.01
    hvd.barrier()
    optimizer.step()
    assert same_on_all_ranks(model.parameters())
