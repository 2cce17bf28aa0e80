"""What bench rpc and bench autograd have a pair of ranks do, over any modules with the functions of torch's.

Rank 0 calls rank 1, whose main thread sleeps. bench autograd trains a network whose first half is on rank 0 and whose
second half is on rank 1. Both contestants run the same functions, each in processes of its own.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from functools import lru_cache, partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from hvlike.bench.harness.comparison import timed
from hvlike.bench.harness.report import format_size
from hvlike.errors import HvlikeError

CALLEE = 1

_BYTES_PER_TURN = 256 << 20
_MOST_TRIPS = 200
_WARM_UPS = 20
_CALLS, _CALLS_AT_ONCE = 300, 1500
_TOLERANCE = 1e-4
_STEP_WARM_UPS = 3
_SECONDS_PER_TURN = 0.25
_MOST_STEPS, _FEWEST_STEPS = 100, 5
Shape = tuple[int, int, int]  # Width of square layers with tanh, batch, and how many layers each rank has


def nothing() -> None:
    """The empty call."""


def echo(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class Trip:
    """A call and its answer, one after the other: empty, or the echo of a tensor of so many bytes."""

    size: int

    @property
    def title(self) -> str:
        return f"echo of {format_size(self.size)}" if self.size else "empty call"

    @property
    def trips(self) -> int:
        return max(1, min(_MOST_TRIPS, _BYTES_PER_TURN // max(1, self.size)))

    @property
    def warm_ups(self) -> int:
        return max(1, min(_WARM_UPS, self.trips // 4))

    def measure(self, rpc: ModuleType) -> list[float]:
        """Seconds of each round trip. Blocks. Raises: HvlikeError when a wrong tensor comes back."""
        call = partial(rpc.rpc_sync, CALLEE, nothing)
        if self.size:
            tensor = torch.arange(self.size, dtype=torch.uint8)
            call = partial(rpc.rpc_sync, CALLEE, echo, (tensor,))
            if not torch.equal(call(), tensor):
                raise HvlikeError(f"{rpc.__name__}: the {self.title} is not what was sent")
        timed(call, self.warm_ups)
        return timed(call, self.trips)


@dataclass(frozen=True)
class Rate:
    """Empty calls by rpc_async, always so many of them in flight."""

    in_flight: int

    @property
    def title(self) -> str:
        return f"{self.in_flight} in flight"

    def measure(self, rpc: ModuleType) -> list[float]:
        """Seconds a call, one value. Blocks."""
        count = _CALLS if self.in_flight == 1 else _CALLS_AT_ONCE
        self._run(rpc, max(_WARM_UPS, self.in_flight))
        (seconds,) = timed(lambda: self._run(rpc, count), 1)
        return [seconds / count]

    def _run(self, rpc: ModuleType, count: int) -> None:
        flying: deque[Any] = deque()
        for _ in range(count):
            if len(flying) == self.in_flight:
                flying.popleft().wait()
            flying.append(rpc.rpc_async(CALLEE, nothing))
        for future in flying:
            future.wait()


@dataclass(frozen=True)
class Idle:
    seconds: float

    @property
    def title(self) -> str:
        return f"idle for {self.seconds:g} s"

    def measure(self, rpc: ModuleType) -> list[float]:
        """What each rank uses meanwhile, as a part of a core. Blocks."""
        before = self._used(rpc)
        start = time.perf_counter()
        time.sleep(self.seconds)
        elapsed = time.perf_counter() - start
        return [(after - used) / elapsed for after, used in zip(self._used(rpc), before, strict=True)]

    def _used(self, rpc: ModuleType) -> tuple[float, float]:
        return time.process_time(), rpc.rpc_sync(CALLEE, time.process_time)


@lru_cache
def half(shape: Shape, which: int) -> nn.Sequential:
    """One half of the network, the same weights in all processes, the same object for all steps of one."""
    width, _, count = shape
    generator = torch.Generator().manual_seed(which)
    layers: list[nn.Module] = []
    for _ in range(count):
        layer = nn.Linear(width, width)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / width**0.5)
        layers += [layer, nn.Tanh()]
    return nn.Sequential(*layers)


@lru_cache
def inputs(shape: Shape) -> Tensor:
    return torch.randn(shape[1], shape[0], generator=torch.Generator().manual_seed(2))


def second_half(shape: Shape, hidden: Tensor) -> Tensor:
    output: Tensor = half(shape, 1)(hidden)
    return output


def _loss(shape: Shape) -> Tensor:
    return second_half(shape, half(shape, 0)(inputs(shape))).square().mean()


@dataclass(frozen=True)
class Step:
    """Forward by RPC, backward, get_gradients."""

    width: int
    batch: int
    layers: int
    unused: int = 0  # Calls of the second half whose results nothing uses

    @property
    def shape(self) -> Shape:
        return (self.width, self.batch, self.layers)

    @property
    def title(self) -> str:
        title = f"{self.layers}+{self.layers} layers of {self.width}, batch {self.batch}"
        return title + (f", {self.unused} unused results" if self.unused else "")

    def run(self, rpc: ModuleType, autograd: ModuleType, **mode: str) -> dict[Tensor, Tensor]:
        """One step; the gradients of rank 0. On rank 0, blocks."""
        shape = self.shape
        with autograd.context() as context:
            hidden = half(shape, 0)(inputs(shape))
            for _ in range(self.unused):
                rpc.rpc_sync(CALLEE, second_half, (shape, hidden))
            loss = rpc.rpc_sync(CALLEE, second_half, (shape, hidden)).square().mean()
            autograd.backward(context, [loss], **mode)
            found: dict[Tensor, Tensor] = autograd.get_gradients(context)
        return found

    def measure(self, rpc: ModuleType, autograd: ModuleType, **mode: str) -> list[float]:
        """Seconds of each of some steps after a few that do not count. Raises: HvlikeError for wrong gradients."""
        run = partial(self.run, rpc, autograd, **mode)
        found = run()
        for parameter, right in zip(half(self.shape, 0).parameters(), expected(self.shape), strict=True):
            allowed = _TOLERANCE * float(right.abs().max())
            if parameter not in found or not torch.allclose(found[parameter], right, rtol=0.0, atol=allowed):
                raise HvlikeError(f"{autograd.__name__}: wrong gradients of {self.title}")
        each = sum(timed(run, _STEP_WARM_UPS)) / _STEP_WARM_UPS
        return timed(run, max(_FEWEST_STEPS, min(_MOST_STEPS, int(_SECONDS_PER_TURN / each))))


@lru_cache
def expected(shape: Shape) -> tuple[Tensor, ...]:
    """The gradients of the first half by ordinary autograd."""
    return torch.autograd.grad(_loss(shape), list(half(shape, 0).parameters()))


def steps_alone(step: Step) -> list[float]:
    """Seconds of each of some steps in one process, without RPC: what the arithmetic takes."""
    parameters = [*half(step.shape, 0).parameters(), *half(step.shape, 1).parameters()]
    taken = timed(lambda: torch.autograd.grad(_loss(step.shape), parameters), _FEWEST_STEPS * 4)
    return taken[_FEWEST_STEPS:]


Work = Trip | Rate | Idle | Step
