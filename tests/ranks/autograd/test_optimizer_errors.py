"""rpc.DistributedOptimizer: what goes wrong on an owner is told with its text, when all owners have answered."""

import pickle
import time
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, optim

import hvlike
from hvlike.errors import UsageError

ended: list[str] = []
"""What optimizers of this worker have come to the end of."""


class Failing(optim.SGD):
    """Fails on the workers it is told to, at once; on the others it takes its time. what: __init__ or step."""

    def __init__(self, parameters: Iterable[Tensor], what: str, ranks: list[int]) -> None:
        super().__init__(parameters, lr=1.0)
        self.what, self.ranks = what, ranks
        self.act("__init__")

    def act(self, now: str) -> None:
        if now == self.what:
            if hvlike.rank() in self.ranks:
                raise ValueError(f"{now} fails on {hvlike.rank()}")
            time.sleep(0.1)
            ended.append(now)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.act("step")
        super().step()


def make_weight(requires_grad: bool = True) -> Tensor:
    return torch.ones(2, requires_grad=requires_grad)


def make_non_leaf() -> Tensor:
    return 2 * make_weight()


def ended_here() -> list[str]:
    return ended


def times(weight: Any, factor: Tensor) -> Tensor:
    product: Tensor = weight.local_value() * factor
    return product


def has_grad(weight: Any) -> bool:
    return weight.local_value().grad is not None


@pytest.fixture(autouse=True)
def forget(rpc: ModuleType) -> Iterator[None]:
    """Each test begins with an empty record on all workers."""
    ended.clear()
    rpc._barrier()
    yield
    rpc._barrier()


def first(rpc: ModuleType) -> bool:
    """Rank 0 tests, the others serve until the fixture's shutdown."""
    return bool(rpc.get_worker_info().id == 0)


def weights(rpc: ModuleType) -> list[Any]:
    """A weight on each worker."""
    return [rpc.remote(rank, make_weight) for rank in range(hvlike.size())]


def test_a_constructor_that_fails_on_one_owner(rpc: ModuleType, autograd: ModuleType) -> None:
    if first(rpc):
        last = hvlike.size() - 1
        with pytest.raises(ValueError, match=f"__init__ fails on {last}"):
            rpc.DistributedOptimizer(Failing, weights(rpc), "__init__", [last])
        assert [rpc.rpc_sync(rank, ended_here) for rank in range(last)] == [["__init__"]] * last
        assert rpc.rpc_sync(last, ended_here) == []


@pytest.mark.mpi(min_size=2)
def test_a_constructor_that_fails_on_several_owners(rpc: ModuleType, autograd: ModuleType) -> None:
    if first(rpc):
        with pytest.raises(ValueError, match=r"2 of \d owners failed") as caught:
            rpc.DistributedOptimizer(Failing, weights(rpc), "__init__", ranks=[0, 1])
        for rank in (0, 1):
            assert f"worker{rank} (rank {rank}) could not make its optimizer" in str(caught.value)
            assert f"__init__ fails on {rank}" in str(caught.value)


def test_a_step_that_fails_on_one_owner(rpc: ModuleType, autograd: ModuleType) -> None:
    """The others have stepped, and the one that failed can be used again."""
    if first(rpc):
        last = hvlike.size() - 1
        parameters = weights(rpc)
        failing = rpc.DistributedOptimizer(Failing, parameters, "step", [last])
        good = rpc.DistributedOptimizer(optim.SGD, parameters, lr=1.0)
        with autograd.context() as context_id:
            factor = torch.full((2,), 4.0)
            outputs = [rpc.rpc_sync(rank, times, (weight, factor)) for rank, weight in enumerate(parameters)]
            autograd.backward(context_id, [torch.stack(outputs).sum()])
            with pytest.raises(ValueError, match=f"step fails on {last}"):
                failing.step(context_id)
            assert [weight.to_here()[0].item() for weight in parameters] == [-3.0] * last + [1.0]
            assert [rpc.rpc_sync(rank, ended_here) for rank in range(last)] == [["step"]] * last
            assert not any(rpc.rpc_sync(rank, has_grad, (weight,)) for rank, weight in enumerate(parameters))
            good.step(context_id)
            assert [weight.to_here()[0].item() for weight in parameters] == [-7.0] * last + [-3.0]


def test_unknown_contexts(rpc: ModuleType, autograd: ModuleType) -> None:
    if first(rpc):
        parameters = weights(rpc)
        optimizer = rpc.DistributedOptimizer(optim.SGD, parameters, lr=1.0)
        with autograd.context() as released:
            pass
        for context_id in (released, 12345):
            with pytest.raises(RuntimeError, match=f"Could not find autograd context with id: {context_id}"):
                optimizer.step(context_id)
        for wrong in ("1", None, True):
            with pytest.raises(TypeError, match="incompatible function arguments"):
                optimizer.step(wrong)
        assert [weight.to_here()[0].item() for weight in parameters] == [1.0] * hvlike.size()


def test_what_is_refused(rpc: ModuleType, autograd: ModuleType) -> None:
    if first(rpc):
        last = hvlike.size() - 1
        with pytest.raises(UsageError, match=r"params_rref\[1\] must be an RRef of a parameter, got Tensor"):
            rpc.DistributedOptimizer(optim.SGD, [rpc.RRef(make_weight()), make_weight()], lr=1.0)
        with pytest.raises(UsageError, match="empty parameter list"):
            rpc.DistributedOptimizer(optim.SGD, [], lr=1.0)
        with pytest.raises(ValueError, match="can't optimize a non-leaf Tensor"):
            rpc.DistributedOptimizer(optim.SGD, [rpc.remote(last, make_non_leaf)], lr=1.0)
        with pytest.raises(TypeError, match="nothing"):
            rpc.DistributedOptimizer(optim.SGD, [rpc.remote(last, make_weight)], nothing=1.0)
        with pytest.raises(ValueError, match="Invalid learning rate"):
            rpc.DistributedOptimizer(optim.SGD, [rpc.remote(last, make_weight)], lr=-1.0)
        with pytest.raises((AttributeError, pickle.PicklingError), match="local"):
            rpc.DistributedOptimizer(lambda parameters: optim.SGD(parameters), [rpc.remote(last, make_weight)])
