"""Every wrapper: n ranks, each with its share of the data, end where one process with all of it ends."""

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
from support.training.parity import CASES, COUNTS, EPS, inputs_of, make, reference, same_optimizers
from support.training.problem import largest_difference, loss_of, make_model, same_on_all_ranks, share, whole_batch
from support.training.ways import Wrapped
from torch import Tensor, nn
from torch.optim import Adam

from hvlike import Compression, DistributedOptimizer, clip_grad_norm_
from hvlike.join import Join

pytestmark = [pytest.mark.differs_by_ranks(2), pytest.mark.differs_by_overlap]

# Schedules of inputs by way; of three ways every other pair, so that each meets each model, schedule and option.
WAYS = {"ddp": [0, 1], "optimizer": [0], "optimizer, no_sync": [1], "zero": [0], "ddp, zero": [1]}


@pytest.mark.in_turn(24)
@pytest.mark.parametrize(
    ("way", "name", "schedule", "passes", "clip"),
    [(way, *case) for way, places in WAYS.items() for number, case in enumerate(CASES) if number // 2 % 2 in places],
)
def test_uneven_inputs(hvd: ModuleType, way: str, name: str, schedule: str, passes: int, clip: float | None) -> None:
    """In a Join context; averages are over all ranks or, with two passes, over those that have inputs."""
    counts = COUNTS[schedule](hvd.size())
    by_active = passes == 2
    model = make(name)
    wrapper: dict[str, Any] = {}
    if way == "optimizer":
        wrapper["backward_passes_per_step"] = passes
    elif way == "ddp":
        wrapper["find_unused_parameters"] = name == "unused parameters"
    elif "zero" in way:
        wrapper["parameters_as_bucket_view"] = passes == 2
    wrapped = Wrapped(way.removesuffix(", no_sync"), model, Adam, wrapper, lr=0.01, eps=EPS)
    with Join(wrapped.joinables, divide_by_initial_world_size=not by_active):
        for step in range(counts[hvd.rank()]):
            wrapped.optimizer.zero_grad()
            for part in range(passes):
                with wrapped.local() if part < passes - 1 and way != "optimizer" else nullcontext():
                    loss = wrapped.module(inputs_of(step, part, hvd.rank()), step).square().mean()
                    (loss / passes).backward()
            if clip is not None:
                wrapped.clip(hvd, clip)
            wrapped.optimizer.step()
    if way.startswith("optimizer"):
        assert same_optimizers(hvd, wrapped.optimizer)
    assert same_on_all_ranks([*model.parameters(), *(model.buffers() if "ddp" in way else ())])
    expected = reference(name, counts, passes, clip, by_active=by_active)
    assert largest_difference(model.parameters(), expected.parameters()) < 1e-9


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("way", ["optimizer", "ddp", "zero", "ddp, zero"])
def test_in_a_process_set(hvd: ModuleType, way: str) -> None:
    """The even ranks train, each on its share; the others are left alone."""
    evens = hvd.add_process_set(list(range(0, hvd.size(), 2)))
    model, alone = make_model(), make_model()
    if evens.included():
        wrapped = Wrapped(way, model, wrapper={"process_set": evens}, lr=0.1, momentum=0.9)
        plain = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            wrapped.optimizer.zero_grad()
            plain.zero_grad()
            inputs, targets = whole_batch(step)
            place, size = evens.rank(), evens.size()
            loss_of(wrapped.module, (inputs[place::size], targets[place::size])).backward()
            loss_of(alone, (inputs, targets)).backward()
            wrapped.optimizer.step()
            plain.step()
        assert largest_difference(model.parameters(), alone.parameters()) < 1e-6
    elif way != "optimizer":
        with pytest.raises(ValueError, match=r"not among the ranks|not a member of"):
            Wrapped(way, model, wrapper={"process_set": evens})
    assert hvd.remove_process_set(evens)


# -- the optimizers of torch, and what gradients are grouped and sent as -------------------------------

STEPS = 4
MAX_NORM = 0.05

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=EPS, fused=True),
    "AdamW foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=EPS, foreach=True),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01, eps=EPS),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.001, eps=EPS),
    "Adadelta": lambda parameters: torch.optim.Adadelta(parameters, lr=1.0),
    "L-BFGS": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3),
}

TOLERANCE = {"none": 1e-6, "fp16": 2e-4, "bf16": 1e-3}
# L-BFGS divides differences of gradients by each other: rounding grows a thousandfold in a few steps, far more where
# clipping makes the differences wrong. So it runs in float64; clipped and rounded for the wire it is not compared.
LBFGS_TOLERANCE = {"none": 1e-7, "fp16": 0.05, "bf16": 0.2}


def run(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    batch_of: Callable[[int], tuple[Tensor, Tensor]],
    passes: int,
    clip: Callable[[], object] | None,
) -> None:
    """Train for some steps, each of `passes` backward passes over parts of the batch."""
    for step in range(STEPS):
        parts = list(zip(*(tensor.chunk(passes) for tensor in batch_of(step)), strict=True))

        def closure(parts: list[tuple[Tensor, Tensor]] = parts) -> Tensor:
            optimizer.zero_grad()
            total = torch.zeros(())
            for part in parts:
                loss = loss_of(model, part) / passes
                loss.backward()
                total += loss.detach()
            if clip is not None:
                clip()
            return total

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def dtype_of(kind: str) -> torch.dtype:
    """The dtype to compare in."""
    return torch.float64 if kind == "L-BFGS" else torch.float32


def cast(batch: tuple[Tensor, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A batch in another dtype."""
    return batch[0].to(dtype), batch[1].to(dtype)


def plain(kind: str, passes: int, clipping: bool) -> list[Tensor]:
    """The parameters after training in one process."""
    model = make_model().to(dtype_of(kind))
    optimizer = OPTIMIZERS[kind](model.parameters())
    parameters = list(model.parameters())
    clip = (lambda: torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)) if clipping else None
    # Each pass of one process covers what the same pass of all ranks covers: only the sums are ordered differently.
    run(optimizer, model, lambda step: cast(whole_batch(step), dtype_of(kind)), passes, clip)
    return parameters


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_ranks_together_equal_one_process(hvd: ModuleType, kind: str) -> None:
    pairs = list(itertools.product([None, 2, "lists"], ["none", "fp16", "bf16"]))
    # Each pair meets both numbers of passes, and is clipped and not: twice each, instead of all four.
    for clipping, passes, first in ((False, 1, 0), (False, 3, 1), (True, 1, 1), (True, 3, 0)):
        expected = plain(kind, passes, clipping)
        for groups, compression in pairs[first::2]:
            model = make_model().to(dtype_of(kind))
            parameters = list(model.parameters())
            lists = [parameters[:3], parameters[4:]]
            optimizer = DistributedOptimizer(
                OPTIMIZERS[kind](parameters),
                named_parameters=model.named_parameters(),
                compression=getattr(Compression, compression),
                backward_passes_per_step=passes,
                groups=lists if groups == "lists" else groups,
            )
            clip = (lambda optimizer=optimizer: clip_grad_norm_(optimizer, MAX_NORM)) if clipping else None
            run(optimizer, model, lambda step: cast(share(hvd, whole_batch(step)), dtype_of(kind)), passes, clip)
            what = f"{kind}, clipping {clipping}, {passes} passes, groups {groups}, compression {compression}"
            tolerance = (LBFGS_TOLERANCE if kind == "L-BFGS" else TOLERANCE)[compression]
            if kind != "L-BFGS" or not clipping or compression == "none":
                assert largest_difference(parameters, expected) < tolerance, what
            assert same_on_all_ranks(parameters), what


def test_parameters_are_bitwise_equal_across_ranks_after_100_steps(hvd: ModuleType) -> None:
    model = make_model()
    optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    for step in range(100):
        optimizer.zero_grad()
        loss_of(model, share(hvd, whole_batch(step))).backward()
        clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
    assert same_on_all_ranks(model.parameters())
