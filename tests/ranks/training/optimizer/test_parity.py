"""n ranks, each with its share of the batch, end where one process with the whole batch ends."""

import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from support.training.problem import largest_difference, loss_of, make_model, same_on_all_ranks, share, whole_batch
from torch import Tensor, nn

from hvlike.collectives.compression import Compression
from hvlike.training.distributed_optimizer import DistributedOptimizer, clip_grad_norm_

STEPS = 4
MAX_NORM = 0.05
EPS = 1e-3
"""Dividing a gradient by its own size makes the rounding of a tiny one as large as any update; this keeps it small."""

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


def reference(kind: str, passes: int, clipping: bool) -> list[Tensor]:
    """The parameters after training in one process."""
    model = make_model().to(dtype_of(kind))
    optimizer = OPTIMIZERS[kind](model.parameters())
    parameters = list(model.parameters())
    clip = (lambda: torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)) if clipping else None
    # Each pass of one process covers what the same pass of all ranks covers: only the sums are ordered differently.
    run(optimizer, model, lambda step: cast(whole_batch(step), dtype_of(kind)), passes, clip)
    return parameters


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_ranks_together_equal_one_process(hvd: ModuleType, kind: str) -> None:
    pairs = list(itertools.product([None, 2, "lists"], ["none", "fp16", "bf16"]))
    # Each pair meets both numbers of passes, and is clipped and not: twice each, instead of all four.
    for clipping, passes, first in ((False, 1, 0), (False, 3, 1), (True, 1, 1), (True, 3, 0)):
        expected = reference(kind, passes, clipping)
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
