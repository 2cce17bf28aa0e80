"""What has no gradient on any rank keeps `.grad` None, its state and its value; if one rank has one, all get it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from support.training.compressed import Doubles
from support.training.problem import same_on_all_ranks
from torch import Tensor, nn
from torch.optim import AdamW

from hvlike.join import Join
from hvlike.nn import DistributedDataParallel, allreduce_hook
from hvlike.optim import ZeroRedundancyOptimizer, hook_with_zero_step

KEYWORDS: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.5}


class Model(nn.Module):
    """Layers that a step may leave out, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict({name: nn.Linear(3, 3) for name in ("all", "one", "none", "frozen")})
        self.layers["frozen"].requires_grad_(False)

    def forward(self, inputs: Tensor, used: str) -> Tensor:
        result = self.layers["frozen"](self.layers["all"](inputs))
        return result + self.layers["one"](inputs) if "one" in used else result


Wrapped = tuple[nn.Module, Any]


def distributed(hvd: ModuleType, model: Model, **options: Any) -> Wrapped:
    return model, hvd.DistributedOptimizer(AdamW(model.parameters(), **KEYWORDS), model.named_parameters(), **options)


def of_a_module(hvd: ModuleType, model: Model) -> Wrapped:
    return DistributedDataParallel(model, find_unused_parameters=True), AdamW(model.parameters(), **KEYWORDS)


def of_a_static_module(hvd: ModuleType, model: Model) -> Wrapped:
    return DistributedDataParallel(model, static_graph=True), AdamW(model.parameters(), **KEYWORDS)


def of_a_hook(hvd: ModuleType, model: Model) -> Wrapped:
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    ddp.register_comm_hook(None, lambda state, bucket: allreduce_hook(state, bucket))
    return ddp, AdamW(model.parameters(), **KEYWORDS)


def zero(hvd: ModuleType, model: Model) -> Wrapped:
    return model, ZeroRedundancyOptimizer(model.parameters(), AdamW, reduce_gradients=True, **KEYWORDS)


def zero_after_a_module(hvd: ModuleType, model: Model) -> Wrapped:
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    return ddp, ZeroRedundancyOptimizer(model.parameters(), AdamW, **KEYWORDS)


def zero_in_backward(hvd: ModuleType, model: Model) -> Wrapped:
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, overlap_with_ddp=True, **KEYWORDS)
    ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, optimizer, warm_up=0))
    return ddp, optimizer


WAYS = [distributed, of_a_module, of_a_hook, zero, zero_after_a_module, zero_in_backward]


def used_by(rank: int, step: int) -> str:
    return "one" if rank == step % 2 else ""


def reference(counts: list[int], **loss: float) -> Model:
    model = Model()
    optimizer = AdamW(model.parameters(), **KEYWORDS)
    for step in range(max(counts)):
        optimizer.zero_grad()
        for rank, count in enumerate(counts):
            if step < count:
                (model(inputs(rank), used_by(rank, step)).sum() / len(counts)).backward()
        optimizer.step()
    return model


def inputs(rank: int) -> Tensor:
    return torch.full((2, 3), rank + 1.0)


@contextmanager
def ending(optimizer: Any) -> Iterator[None]:
    yield
    if not getattr(optimizer, "overlaps_with_ddp", False):
        optimizer.step()


def train(hvd: ModuleType, wrapped: nn.Module, optimizer: Any, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        with ending(optimizer):
            wrapped(inputs(hvd.rank()), used_by(hvd.rank(), step)).sum().backward()


def check(model: Model, plain: Model) -> None:
    assert same_on_all_ranks(model.parameters())
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)
    for name in ("none", "frozen"):
        for parameter, untouched in zip(
            model.layers[name].parameters(), Model().layers[name].parameters(), strict=True
        ):
            assert torch.equal(parameter, untouched)
            assert parameter.grad is None


@pytest.mark.parametrize("way", WAYS)
def test_as_one_process(hvd: ModuleType, way: Callable[[ModuleType, Model], Wrapped]) -> None:
    model = Model()
    wrapped, optimizer = way(hvd, model)
    train(hvd, wrapped, optimizer, steps=4)
    check(model, reference([4] * hvd.size()))
    state = {id(each) for each in optimizer.state}
    assert not state & {id(each) for name in ("none", "frozen") for each in model.layers[name].parameters()}


@pytest.mark.parametrize("way", [distributed, of_a_module, of_a_hook, zero, zero_after_a_module])
def test_in_a_join_context(hvd: ModuleType, way: Callable[[ModuleType, Model], Wrapped]) -> None:
    model = Model()
    wrapped, optimizer = way(hvd, model)
    counts = [2 + 2 * rank for rank in range(hvd.size())]
    both = [each for each in (wrapped, optimizer) if hasattr(each, "join_hook")]
    with Join(both):
        train(hvd, wrapped, optimizer, counts[hvd.rank()])
    assert same_on_all_ranks(model.parameters())
    plain = reference(counts)
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)


def test_in_a_static_graph(hvd: ModuleType) -> None:
    model = Model()
    wrapped, optimizer = of_a_static_module(hvd, model)
    for _ in range(3):
        optimizer.zero_grad()
        wrapped(inputs(hvd.rank()), "").sum().backward()
        optimizer.step()
    assert same_on_all_ranks(model.parameters())
    for name in ("one", "none"):
        assert torch.equal(model.layers[name].weight, Model().layers[name].weight)


def test_with_a_compressor_of_the_program(hvd: ModuleType) -> None:
    model = Model()
    wrapped, optimizer = distributed(hvd, model, compression=Doubles())
    train(hvd, wrapped, optimizer, steps=4)
    assert same_on_all_ranks(model.parameters())
    assert torch.equal(model.layers["none"].weight, Model().layers["none"].weight)


def test_adasum(hvd: ModuleType) -> None:
    model = Model()
    wrapped, optimizer = distributed(hvd, model, op=hvd.Adasum)
    train(hvd, wrapped, optimizer, steps=4)
    assert same_on_all_ranks(model.parameters())
    for name in ("none", "frozen"):
        assert torch.equal(model.layers[name].weight, Model().layers[name].weight)
        assert model.layers[name].weight.grad is None


def test_no_gradient_at_all(hvd: ModuleType) -> None:
    for way in (distributed, zero):
        model = Model()
        _, optimizer = way(hvd, model)
        for _ in range(2):
            optimizer.step()
        assert all(torch.equal(*pair) for pair in zip(model.parameters(), Model().parameters(), strict=True))
        assert not optimizer.state


def test_a_gradient_of_zeros_is_one(hvd: ModuleType) -> None:
    for way in (distributed, zero):
        model = Model()
        _, optimizer = way(hvd, model)
        if hvd.rank() == hvd.size() - 1:
            model.layers["none"].weight.grad = torch.zeros(3, 3)
        optimizer.step()
        torch.testing.assert_close(model.layers["none"].weight, Model().layers["none"].weight * 0.95)


@pytest.mark.parametrize("way", [distributed, zero])
def test_some_sums_over_several_passes(hvd: ModuleType, way: Callable[[ModuleType, Model], Wrapped]) -> None:
    model, plain = Model(), Model()
    _, optimizer = way(hvd, model)
    its = AdamW(plain.parameters(), **KEYWORDS)
    for step in range(3):
        for each, stepper, ranks in ((model, optimizer, [hvd.rank()]), (plain, its, range(hvd.size()))):
            stepper.zero_grad(set_to_none=step != 1)
            for rank in ranks:
                (each(inputs(rank), used_by(rank, step)).sum() / len(ranks)).backward()
            stepper.step()
    check_values(model, plain)


def check_values(model: Model, plain: Model) -> None:
    assert same_on_all_ranks(model.parameters())
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"op": "Adasum"}, {"zero": True}], ids=["average", "adasum", "zero"])
def test_what_a_scaler_looks_at_is_no_gradient(hvd: ModuleType, options: dict[str, Any]) -> None:
    """A scaler refuses an optimizer without gradients: what is put there for it is gone when the step is made."""
    model = Model()
    if options.get("zero"):
        _, optimizer = zero(hvd, model)
    else:
        _, optimizer = distributed(hvd, model, **({"op": hvd.Adasum} if options else {}))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(torch.ones(1, 3), "").sum()
        if hvd.rank() == 0:
            scaler.scale(loss).backward()
        else:
            scaler.scale(loss)
        scaler.step(optimizer)
        scaler.update()
    assert same_on_all_ranks(model.parameters())
    for name in ("one", "none", "frozen"):
        assert torch.equal(model.layers[name].weight, Model().layers[name].weight)


def test_sparse_gradients(hvd: ModuleType) -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    other = nn.Embedding(4, 2, sparse=True)
    for each in (embedding, other):
        nn.init.ones_(each.weight)
    parameters = [("one", embedding.weight), ("other", other.weight)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([each for _, each in parameters], lr=1.0), parameters)
    for step in range(3):
        optimizer.zero_grad()
        if hvd.rank() == 0 or step == 0:
            embedding(torch.tensor([1])).sum().backward()
        optimizer.step()
        assert other.weight.grad is None
    assert same_on_all_ranks([embedding.weight, other.weight])


@pytest.mark.parametrize("overlap", ["0", "1"])
def test_sparse_ones(hvd: ModuleType, restarted: Callable[[Mapping[str, str]], None], overlap: str) -> None:
    """Also where the dense ones are reduced before it is known which sparse ones will come."""
    restarted({"HVLIKE_OVERLAP": overlap})
    torch.manual_seed(0)
    table, layer = nn.Embedding(5, 3, sparse=True), nn.Linear(3, 3)
    parameters = [*table.parameters(), *layer.parameters()]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1))
    for used in ([1], [], range(hvd.size()), []):
        optimizer.zero_grad()
        rows = layer(torch.ones(2, 3))
        if hvd.rank() in used:
            rows = rows * table(torch.tensor([0, 3]))
        rows.sum().backward()
        optimizer.step()
        assert (table.weight.grad is None) == (not any(rank < hvd.size() for rank in used))
        assert same_on_all_ranks(parameters)
