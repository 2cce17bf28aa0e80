"""Mixed precision with a GradScaler: an infinity on one rank skips the step on all, in each way the scaler is used."""

from types import ModuleType
from typing import Any

import pytest
import torch
from support.training.problem import largest_difference, loss_of, make_model, same_on_all_ranks, share, whole_batch
from support.training.ways import Wrapped
from torch import nn
from torch.amp import GradScaler
from torch.optim import AdamW

from hvlike import allgather_object, clip_grad_norm_

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
RECIPES: dict[str, list[Any]] = {
    "optimizer": [*CLIPPING, step_plain],
    "adasum": [step_torchs_clipping, step_plain],
    "ddp": [step_torchs_clipping, step_plain],
    "zero": [step_our_clipping, step_plain],
}
OPTIONS = {"lr": 0.01, "eps": 1e-3}


def make(fused: bool = False) -> tuple[nn.Module, Any]:
    model = make_model()
    return model, Wrapped("optimizer", model, AdamW, **OPTIONS, fused=fused).optimizer


def reference(fused: bool, clip: bool) -> nn.Module:
    """One process with the whole batch, without a scaler: bad steps are left out."""
    model = make_model()
    optimizer = AdamW(model.parameters(), **OPTIONS, fused=fused)
    for step in range(STEPS):
        if step not in BAD_STEPS:
            optimizer.zero_grad()
            loss_of(model, whole_batch(step)).backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
    return model


@pytest.mark.parametrize("scaler_class", [GradScaler, CustomScaler])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("way", "recipe"), [(way, each) for way, recipes in RECIPES.items() for each in recipes])
def test_an_infinity_on_one_rank_skips_the_step_on_all(
    hvd: ModuleType, way: str, recipe: Any, fused: bool, scaler_class: type[GradScaler]
) -> None:
    model = make_model()
    wrapped = Wrapped(way, model, AdamW, **OPTIONS, fused=fused)
    scaler = scaler_class("cpu", init_scale=1024.0)
    for step in range(STEPS):
        loss = loss_of(wrapped.module, share(hvd, whole_batch(step)))
        if step in BAD_STEPS and hvd.rank() == hvd.size() - 1:
            loss = loss * float("inf")
        before = [each.detach().clone() for each in model.parameters()]
        wrapped.optimizer.zero_grad()
        scaler.scale(loss).backward()
        recipe(scaler, wrapped.optimizer, model)
        scaler.update()
        assert (largest_difference(model.parameters(), before) == 0) is (step in BAD_STEPS)
    assert allgather_object(scaler.get_scale()) == [1024.0 / 2 ** len(BAD_STEPS)] * hvd.size()
    assert same_on_all_ranks(model.parameters())
    if way != "adasum":
        expected = reference(fused, recipe in CLIPPING)
        assert largest_difference(model.parameters(), expected.parameters()) < 1e-5


def test_a_skipped_step_leaves_the_next_one_clean_without_zero_grad_of_the_optimizer(hvd: ModuleType) -> None:
    model, optimizer = make()
    scaler = GradScaler("cpu", init_scale=8.0)
    for step in range(4):
        model.zero_grad()
        factor = float("nan") if step == 1 and hvd.rank() == 0 else 1.0
        scaler.scale(loss_of(model, share(hvd, whole_batch(step))) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 4.0
    assert same_on_all_ranks(model.parameters())


@pytest.mark.parametrize("way", ["optimizer", "adasum"])
def test_a_rank_without_a_backward_pass_takes_part(hvd: ModuleType, way: str) -> None:
    model = make_model()
    optimizer = Wrapped(way, model).optimizer
    scaler = GradScaler("cpu", init_scale=8.0)
    loss = scaler.scale(loss_of(model, share(hvd, whole_batch())))
    if hvd.rank() == 0:
        loss.backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 8.0
    assert same_on_all_ranks(model.parameters())
    assert largest_difference(model.parameters(), make_model().parameters()) > 0


def test_a_fused_optimizer_gets_the_scale_and_keeps_nothing_of_it(hvd: ModuleType) -> None:
    model, optimizer = make(fused=True)
    seen: list[float] = []
    optimizer.register_step_pre_hook(lambda wrapped, *_: seen.append(float(wrapped.grad_scale)))
    scaler = GradScaler("cpu", init_scale=16.0)
    scaler.scale(loss_of(model, share(hvd, whole_batch()))).backward()
    scaler.step(optimizer)
    assert seen == [16.0]
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer.wrapped, "found_inf")


def test_a_disabled_scaler_changes_nothing(hvd: ModuleType) -> None:
    model, optimizer = make()
    scaler = GradScaler("cpu", enabled=False)
    scaler.scale(loss_of(model, share(hvd, whole_batch()))).backward()
    scaler.step(optimizer)
    scaler.update()
    assert same_on_all_ranks(model.parameters())


def test_other_readers_of_the_groups_do_not_start_a_collective(hvd: ModuleType) -> None:
    model, optimizer = make()
    loss_of(model, share(hvd, whole_batch())).backward()
    if hvd.rank() == 0:
        assert optimizer.param_groups[0]["lr"] == 0.01
    hvd.barrier()
    optimizer.step()
    assert same_on_all_ranks(model.parameters())
