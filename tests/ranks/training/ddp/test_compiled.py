"""DistributedDataParallel in a step under torch.compile: zero_grad, forward, backward and step in one function."""

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import pytest
import torch
from support.compiled import Step, compare, net
from torch import Tensor, nn

import hvlike as hvd_
from hvlike.nn import DistributedDataParallel

pytestmark = pytest.mark.filterwarnings("ignore")  # What torch.compile warns about its own doings

Restart = Callable[[Mapping[str, str]], None]


def step_of(model: nn.Module) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def accumulating(model: Any) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        with model.no_sync():
            model(x).square().mean().backward()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def hooked() -> DistributedDataParallel:
    model = DistributedDataParallel(net())
    model.register_comm_hook(None, lambda state, bucket: hvd_.allreduce_async(bucket.buffer()))
    return model


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Step]]] = {
    "plain": (lambda: DistributedDataParallel(net()), step_of),
    "unused": (lambda: DistributedDataParallel(net(), find_unused_parameters=True), step_of),
    "static_graph": (lambda: DistributedDataParallel(net(), static_graph=True), step_of),
    "no_sync": (lambda: DistributedDataParallel(net()), accumulating),
    "hook": (hooked, step_of),
}


def run(hvd: ModuleType, kind: str) -> None:
    if hvd.size() > 2:
        pytest.skip("compiled on up to two ranks")
    wrap, make_step = KINDS[kind]

    def make() -> tuple[nn.Module, Step]:
        model = wrap()
        return model, make_step(model)

    compare(hvd, make)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step(hvd: ModuleType, kind: str) -> None:
    run(hvd, kind)


def test_beside_backward(hvd: ModuleType, restarted: Restart) -> None:
    restarted({"HVLIKE_OVERLAP": "1", "HVLIKE_BUCKET_BYTES": "64"})
    run(hvd, "plain")
