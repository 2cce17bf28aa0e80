"""op=Adasum: n ranks end where one process ends that takes each rank's local step and combines the changes."""

import copy
import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from support.adasum_reference import adasum
from support.training.problem import largest_difference, loss_of, make_model, same_on_all_ranks, whole_batch
from torch import Tensor, nn

from hvlike import Compression, DistributedOptimizer

pytestmark = pytest.mark.differs_by_ranks(2, 4)

STEPS = 4

Batch = tuple[Tensor, Tensor]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "AdamW foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-3, foreach=True),
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-3, fused=True),
    "L-BFGS": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3),
}


def batch_of(rank: int, size: int, step: int, dtype: torch.dtype = torch.float64) -> Batch:
    inputs, targets = whole_batch(step)
    return inputs[rank::size].to(dtype), targets[rank::size].to(dtype)


def local_step(optimizer: torch.optim.Optimizer, model: nn.Module, batch: Batch, passes: int = 1) -> Any:
    """One step of so many backward passes; with a closure where the optimizer wants one."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for part in zip(*(tensor.chunk(passes) for tensor in batch), strict=True):
            loss = loss_of(model, part) / passes
            loss.backward()
            total += loss.detach()
        return total

    if isinstance(optimizer, torch.optim.LBFGS):
        return optimizer.step(closure)
    closure()
    return optimizer.step()


def reference(
    kind: str, size: int, passes: int = 1, dtype: torch.dtype = torch.float64, wire: torch.dtype | None = None
) -> list[Tensor]:
    """One process that plays all ranks: a model and an optimizer with its state for each."""
    models = [make_model().to(dtype) for _ in range(size)]
    optimizers = [OPTIMIZERS[kind](model.parameters()) for model in models]
    for step in range(STEPS):
        starts = [parameter.detach().clone() for parameter in models[0].parameters()]
        for rank, (optimizer, model) in enumerate(zip(optimizers, models, strict=True)):
            local_step(optimizer, model, batch_of(rank, size, step, dtype), passes)
        for index, start in enumerate(starts):
            ranks = [list(model.parameters())[index] for model in models]
            deltas = [parameter.detach() - start for parameter in ranks]
            total = adasum([delta.to(wire or dtype) for delta in deltas]).to(wire or dtype).to(dtype)
            for parameter in ranks:
                parameter.detach().copy_(start + total)
    return list(models[0].parameters())


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_ranks_together_equal_the_process_that_plays_them(hvd: ModuleType, kind: str) -> None:
    for passes in (1, 3):
        expected = reference(kind, hvd.size(), passes)
        for groups in (None, 2, "lists"):
            model = make_model().double()
            parameters = list(model.parameters())
            optimizer = DistributedOptimizer(
                OPTIMIZERS[kind](parameters),
                named_parameters=model.named_parameters(),
                op=hvd.Adasum,
                backward_passes_per_step=passes,
                groups=[parameters[:3], parameters[4:]] if groups == "lists" else groups,
            )
            for step in range(STEPS):
                local_step(optimizer, model, batch_of(hvd.rank(), hvd.size(), step), passes)
            what = f"{kind}, {passes} passes, groups {groups}"
            assert largest_difference(parameters, expected) < 1e-9, what
            assert same_on_all_ranks(parameters), what


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_compressed_changes(hvd: ModuleType, compression: str) -> None:
    wire = {"fp16": torch.float16, "bf16": torch.bfloat16}[compression]
    expected = reference("SGD momentum", hvd.size(), dtype=torch.float32, wire=wire)
    model = make_model()
    wrapped = OPTIMIZERS["SGD momentum"](model.parameters())
    optimizer = DistributedOptimizer(wrapped, op=hvd.Adasum, compression=getattr(Compression, compression))
    for step in range(STEPS):
        local_step(optimizer, model, batch_of(hvd.rank(), hvd.size(), step, torch.float32))
    assert largest_difference(model.parameters(), expected) < {"fp16": 2e-4, "bf16": 1e-3}[compression]
    assert same_on_all_ranks(model.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_parameters_stay_equal(hvd: ModuleType, dtype: torch.dtype) -> None:
    model = make_model().to(dtype)
    start = copy.deepcopy(model)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Adasum)
    losses = []
    for _ in range(10):
        batch = batch_of(hvd.rank(), hvd.size(), 0, dtype)
        losses.append(loss_of(model, batch).item())
        local_step(optimizer, model, batch)
    assert same_on_all_ranks(model.parameters())
    assert losses[-1] < losses[0]
    assert largest_difference(model.parameters(), start.parameters()) > 0


def test_one_rank_alone_takes_the_plain_step(hvd: ModuleType) -> None:
    if hvd.size() > 1:
        pytest.skip("for a job of one")
    model, plain = make_model(), make_model()
    optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters()), op=hvd.Adasum)
    expected = torch.optim.AdamW(plain.parameters())
    for step in range(3):
        local_step(optimizer, model, batch_of(0, 1, step, torch.float32))
        local_step(expected, plain, batch_of(0, 1, step, torch.float32))
    assert all(torch.equal(a, b) for a, b in itertools.zip_longest(model.parameters(), plain.parameters()))


@pytest.mark.mpi(min_size=3)
def test_in_a_process_set(hvd: ModuleType) -> None:
    size, rank = hvd.size(), hvd.rank()
    hvd.shutdown()
    even, odd = hvd.ProcessSet(range(0, size, 2)), hvd.ProcessSet(range(1, size, 2))
    hvd.init(process_sets=[even, odd])
    mine = odd if rank % 2 else even
    ranks = list(mine.ranks)
    vectors = [torch.arange(5.0, dtype=torch.float64) - each for each in range(size)]
    result = hvd.allreduce(vectors[rank], op=hvd.Adasum, process_set=mine)
    torch.testing.assert_close(result, adasum([vectors[each] for each in ranks]))

    expected = reference("SGD momentum", len(ranks))
    model = make_model().double()
    optimizer = DistributedOptimizer(OPTIMIZERS["SGD momentum"](model.parameters()), op=hvd.Adasum, process_set=mine)
    for step in range(STEPS):
        local_step(optimizer, model, batch_of(ranks.index(rank), len(ranks), step))
    assert largest_difference(model.parameters(), expected) < 1e-9

    # A rank outside of the set steps alone.
    lonely = make_model().double()
    outside = DistributedOptimizer(torch.optim.SGD(lonely.parameters(), lr=0.1), op=hvd.Adasum, process_set=even)
    local_step(outside, lonely, batch_of(0, 1, 0))
    plain = make_model().double()
    local_step(torch.optim.SGD(plain.parameters(), lr=0.1), plain, batch_of(0, 1, 0))
    assert largest_difference(lonely.parameters(), plain.parameters()) < 1e-12
    hvd.shutdown()
    hvd.init()
