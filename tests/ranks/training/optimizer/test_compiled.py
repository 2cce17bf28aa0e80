"""Optimizers in a step under torch.compile: zero_grad, forward, backward and step in one function.

Dynamo traced what it met on the way: hooks that backward called, and methods that bore no mark.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from support.compiled import Step, compare, net
from torch import Tensor, nn

import hvlike as hvd_
from hvlike.join import Join
from hvlike.optim import ZeroRedundancyOptimizer

pytestmark = pytest.mark.filterwarnings("ignore")  # What torch.compile warns about its own doings


def distributed(model: nn.Module, **options: Any) -> Any:
    return hvd_.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **options)


def zero(model: nn.Module) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, reduce_gradients=True)


def backward(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    loss.backward()
    return loss


def plain(optimizer: Any, model: nn.Module) -> Step:
    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        backward(model, x)
        optimizer.step()

    return step


def clipping(optimizer: Any, model: nn.Module) -> Step:
    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        backward(model, x)
        hvd_.clip_grad_norm_(optimizer, 0.1)
        optimizer.step()

    return step


def skipping(optimizer: Any, model: nn.Module) -> Step:
    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        backward(model, x)
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()

    return step


def accumulating(optimizer: Any, model: nn.Module) -> Step:
    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        with optimizer.no_sync():
            backward(model, x)
        backward(model, x)
        optimizer.step()

    return step


def twice(optimizer: Any, model: nn.Module) -> Step:
    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        backward(model, x)
        backward(model, x)
        optimizer.step()

    return step


def closing(optimizer: Any, model: nn.Module) -> Step:
    def step(x: Tensor) -> Any:
        def closure() -> Tensor:
            optimizer.zero_grad()
            return backward(model, x)

        return optimizer.step(closure)

    return step


def scaling(optimizer: Any, model: nn.Module) -> Step:
    scaler = torch.amp.GradScaler("cpu")

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def joining(optimizer: Any, model: nn.Module) -> Step:
    def step(x: Tensor) -> None:
        with Join([optimizer]):
            for _ in range(1 + hvd_.rank()):
                optimizer.zero_grad()
                backward(model, x)
                optimizer.step()

    return step


KINDS: dict[str, tuple[Callable[[nn.Module], Any], Callable[[Any, nn.Module], Step]]] = {
    "plain": (distributed, plain),
    "clipping": (distributed, clipping),
    "skip_synchronize": (distributed, skipping),
    "no_sync": (distributed, accumulating),
    "two passes": (lambda model: distributed(model, backward_passes_per_step=2), twice),
    "closure": (distributed, closing),
    "GradScaler": (distributed, scaling),
    "Join": (distributed, joining),
    "Adasum": (lambda model: distributed(model, op=hvd_.Adasum), plain),
    "float16": (lambda model: distributed(model, compression=hvd_.Compression.fp16), plain),
    "ZeRO": (zero, plain),
    "ZeRO, clipping": (zero, clipping),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_step(hvd: ModuleType, kind: tuple[Callable[[nn.Module], Any], Callable[[Any, nn.Module], Step]]) -> None:
    if hvd.size() > 2:
        pytest.skip("compiled on up to two ranks")
    wrap, make_step = kind

    def make() -> tuple[nn.Module, Step]:
        model = net()
        return model, make_step(wrap(model), model)

    compare(hvd, make)


def test_batch_normalisation(hvd: ModuleType) -> None:
    if hvd.size() > 2:
        pytest.skip("compiled on up to two ranks")

    def make() -> tuple[nn.Module, Step]:
        torch.manual_seed(0)
        model = hvd.convert_sync_batchnorm(nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
        return model, plain(distributed(model), model)

    compare(hvd, make)
