"""What has no gradient on any rank keeps `.grad` None, its state and its value; if one rank has one, all get it."""

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import pytest
import torch
from support.training.compressed import Doubles
from support.training.problem import same_on_all_ranks
from support.training.ways import Wrapped
from torch import Tensor, nn
from torch.optim import AdamW

from hvlike.join import Join

pytestmark = pytest.mark.differs_by_overlap

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


WAYS = ["optimizer", "find unused", "hook", "zero", "ddp, zero", "zero in backward"]


def wrap(way: str, model: Model, **wrapper: Any) -> Wrapped:
    return Wrapped(way, model, AdamW, wrapper, **KEYWORDS)


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


def train(hvd: ModuleType, wrapped: Wrapped, steps: int) -> None:
    for step in range(steps):
        wrapped.optimizer.zero_grad()
        wrapped.module(inputs(hvd.rank()), used_by(hvd.rank(), step)).sum().backward()
        if wrapped.way != "zero in backward":
            wrapped.optimizer.step()


def check(model: Model, plain: Model) -> None:
    assert same_on_all_ranks(model.parameters())
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)


def check_untouched(model: Model) -> None:
    for name in ("none", "frozen"):
        for parameter, untouched in zip(
            model.layers[name].parameters(), Model().layers[name].parameters(), strict=True
        ):
            assert torch.equal(parameter, untouched)
            assert parameter.grad is None


@pytest.mark.parametrize("way", WAYS)
def test_as_one_process(hvd: ModuleType, way: str) -> None:
    model = Model()
    wrapped = wrap(way, model)
    train(hvd, wrapped, steps=4)
    check(model, reference([4] * hvd.size()))
    check_untouched(model)
    state = {id(each) for each in wrapped.optimizer.state}
    assert not state & {id(each) for name in ("none", "frozen") for each in model.layers[name].parameters()}


@pytest.mark.parametrize("way", WAYS[:-1])
def test_in_a_join_context(hvd: ModuleType, way: str) -> None:
    model = Model()
    wrapped = wrap(way, model)
    counts = [2 + 2 * rank for rank in range(hvd.size())]
    with Join(wrapped.joinables):
        train(hvd, wrapped, counts[hvd.rank()])
    check(model, reference(counts))


def test_in_a_static_graph(hvd: ModuleType) -> None:
    model = Model()
    wrapped = wrap("static graph", model)
    for _ in range(3):
        wrapped.optimizer.zero_grad()
        wrapped.module(inputs(hvd.rank()), "").sum().backward()
        wrapped.optimizer.step()
    assert same_on_all_ranks(model.parameters())
    for name in ("one", "none"):
        assert torch.equal(model.layers[name].weight, Model().layers[name].weight)


@pytest.mark.parametrize(("way", "wrapper"), [("optimizer", {"compression": Doubles()}), ("adasum", {})])
def test_what_is_reduced_otherwise(hvd: ModuleType, way: str, wrapper: dict[str, Any]) -> None:
    """By a compressor of the program, or changes of parameters."""
    model = Model()
    train(hvd, wrap(way, model, **wrapper), steps=4)
    assert same_on_all_ranks(model.parameters())
    check_untouched(model)


@pytest.mark.parametrize("way", ["optimizer", "zero"])
def test_no_gradient_at_all(hvd: ModuleType, way: str) -> None:
    model = Model()
    optimizer = wrap(way, model).optimizer
    for _ in range(2):
        optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), Model().parameters(), strict=True))
    assert not optimizer.state


@pytest.mark.parametrize("way", ["optimizer", "zero"])
def test_a_gradient_of_zeros_is_one(hvd: ModuleType, way: str) -> None:
    model = Model()
    optimizer = wrap(way, model).optimizer
    if hvd.rank() == hvd.size() - 1:
        model.layers["none"].weight.grad = torch.zeros(3, 3)
    optimizer.step()
    torch.testing.assert_close(model.layers["none"].weight, Model().layers["none"].weight * 0.95)


@pytest.mark.parametrize("way", ["optimizer", "zero"])
def test_some_sums_over_several_passes(hvd: ModuleType, way: str) -> None:
    model, plain = Model(), Model()
    optimizer = wrap(way, model).optimizer
    its = AdamW(plain.parameters(), **KEYWORDS)
    for step in range(3):
        for each, stepper, ranks in ((model, optimizer, [hvd.rank()]), (plain, its, range(hvd.size()))):
            stepper.zero_grad(set_to_none=step != 1)
            for rank in ranks:
                (each(inputs(rank), used_by(rank, step)).sum() / len(ranks)).backward()
            stepper.step()
    check(model, plain)


@pytest.mark.parametrize("way", ["optimizer", "adasum", "zero"])
def test_what_a_scaler_looks_at_is_no_gradient(hvd: ModuleType, way: str) -> None:
    """A scaler refuses an optimizer without gradients: what is put there for it is gone when the step is made."""
    model = Model()
    optimizer = wrap(way, model).optimizer
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
