"""torch.compile: of models, and of a whole step, zero_grad, forward, backward and step in one function.

Dynamo traced what it met on the way: hooks that backward called, and methods that bore no mark.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from support.compiled import Step, compare, net
from support.training.problem import largest_difference
from support.training.ways import Wrapped
from torch import Tensor, nn
from torch.amp import GradScaler

import hvlike
from hvlike.join import Join

# Ignored: what torch.compile warns about its own doings.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.differs_by_ranks(2)]


def wrap(way: str, wrapper: Mapping[str, Any] | None = None) -> Wrapped:
    return Wrapped(way, net(), wrapper=wrapper)


def averaging() -> Wrapped:
    """A hook of the program that answers by a handle."""
    wrapped = wrap("ddp")
    wrapped.module.register_comm_hook(None, lambda state, bucket: hvlike.allreduce_async(bucket.buffer()))
    return wrapped


def normalizing() -> Wrapped:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    return Wrapped("optimizer", hvlike.convert_sync_batchnorm(layers))


def plain(wrapped: Wrapped, x: Tensor) -> Any:
    wrapped.optimizer.zero_grad()
    backward(wrapped.module, x)
    wrapped.optimizer.step()


def backward(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    loss.backward()
    return loss


def clipping(wrapped: Wrapped, x: Tensor) -> Any:
    wrapped.optimizer.zero_grad()
    backward(wrapped.module, x)
    hvlike.clip_grad_norm_(wrapped.optimizer, 0.1)
    wrapped.optimizer.step()


def skipping(wrapped: Wrapped, x: Tensor) -> Any:
    wrapped.optimizer.zero_grad()
    backward(wrapped.module, x)
    wrapped.optimizer.synchronize()
    with wrapped.optimizer.skip_synchronize():
        wrapped.optimizer.step()


def accumulating(wrapped: Wrapped, x: Tensor) -> Any:
    wrapped.optimizer.zero_grad()
    with wrapped.local():
        backward(wrapped.module, x)
    backward(wrapped.module, x)
    wrapped.optimizer.step()


def twice(wrapped: Wrapped, x: Tensor) -> Any:
    wrapped.optimizer.zero_grad()
    backward(wrapped.module, x)
    backward(wrapped.module, x)
    wrapped.optimizer.step()


def closing(wrapped: Wrapped, x: Tensor) -> Any:
    def closure() -> Tensor:
        wrapped.optimizer.zero_grad()
        return backward(wrapped.module, x)

    return wrapped.optimizer.step(closure)


def scaling(scaler: GradScaler, wrapped: Wrapped, x: Tensor) -> Any:
    wrapped.optimizer.zero_grad()
    scaler.scale(wrapped.module(x).square().mean()).backward()
    scaler.step(wrapped.optimizer)
    scaler.update()


def joining(wrapped: Wrapped, x: Tensor) -> Any:
    with Join(wrapped.joinables):
        for _ in range(1 + hvlike.rank()):
            plain(wrapped, x)


KINDS: dict[str, tuple[Callable[[], Wrapped], Callable[..., Any]]] = {
    "plain": (partial(wrap, "optimizer"), plain),
    "clipping": (partial(wrap, "optimizer"), clipping),
    "skip_synchronize": (partial(wrap, "optimizer"), skipping),
    "no_sync": (partial(wrap, "optimizer"), accumulating),
    "two passes": (partial(wrap, "optimizer", {"backward_passes_per_step": 2}), twice),
    "closure": (partial(wrap, "optimizer"), closing),
    "GradScaler": (partial(wrap, "optimizer"), scaling),
    "Join": (partial(wrap, "optimizer"), joining),
    "Adasum": (partial(wrap, "adasum"), plain),
    "float16": (partial(wrap, "optimizer", {"compression": hvlike.Compression.fp16}), plain),
    "SyncBatchNorm": (normalizing, plain),
    "ZeRO": (partial(wrap, "zero"), plain),
    "ZeRO, clipping": (partial(wrap, "zero"), clipping),
    "DDP": (partial(wrap, "ddp"), plain),
    "DDP, unused": (partial(wrap, "find unused"), plain),
    "DDP, static_graph": (partial(wrap, "static graph"), plain),
    "DDP, no_sync": (partial(wrap, "ddp"), accumulating),
    "DDP, hook": (averaging, plain),
}


@pytest.fixture(autouse=True)
def _on_two_ranks(hvd: ModuleType) -> None:
    """Compiling takes each rank seconds, and makes of a model the same wherever it is trained."""
    if hvd.size() > 2:
        pytest.skip("compiled on up to two ranks")


def run(hvd: ModuleType, kind: str) -> None:
    wrap, step = KINDS[kind]

    def make() -> tuple[nn.Module, Step]:
        wrapped = wrap()
        state = (GradScaler("cpu"), wrapped) if step is scaling else (wrapped,)

        def of_batch(x: Tensor) -> Any:
            return step(*state, x)

        return wrapped.inner, of_batch

    compare(hvd, make)


@pytest.mark.in_turn(6)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step(hvd: ModuleType, kind: str) -> None:
    run(hvd, kind)


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("way", ["optimizer", "ddp", "ddp around it"])
def test_a_model(hvd: ModuleType, way: str, backend: str) -> None:
    """Compiled before it is wrapped, or around the wrapper."""
    alone, model = net(), net()
    if way == "ddp around it":
        wrapped = Wrapped("ddp", torch.compile(model, backend=backend))
    else:
        wrapped = Wrapped(way, model)
        wrapped.module = torch.compile(wrapped.module, backend=backend)
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(3):
        batch = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
        wrapped.optimizer.zero_grad()
        backward(wrapped.module, batch[hvd.rank() :: hvd.size()])
        wrapped.optimizer.step()
        plain.zero_grad()
        backward(alone, batch)
        plain.step()
    assert largest_difference(model.parameters(), alone.parameters()) < 1e-6
    torch.compiler.reset()


@pytest.mark.usefixtures("beside_backward")
def test_a_step_beside_backward(hvd: ModuleType) -> None:
    """The last one of this file."""
    run(hvd, "DDP")
