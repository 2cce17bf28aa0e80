"""What bench autograd has a pair of ranks do, over any modules with the functions of torch's RPC and autograd.

A network whose first half is on rank 0, where steps begin, and whose second half is on rank 1. Everything here is run
by both contestants, each in processes of its own.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor, nn

from hvlike.bench.conversation import Message
from hvlike.bench.rpc_work import CALLEE
from hvlike.errors import HvlikeError

KIND = "step"
"""What messages about this work say that they are."""

_TOLERANCE = 1e-4
_WARM_UPS = 3
_SECONDS_PER_TURN = 0.25
_MOST_STEPS, _FEWEST_STEPS = 100, 5


@dataclass(frozen=True)
class Shape:
    """The size of a network: square layers of `width` with tanh, `layers` on each rank, and a batch."""

    width: int
    batch: int
    layers: int

    @property
    def title(self) -> str:
        """What tables call it."""
        return f"{self.layers}+{self.layers} layers of {self.width}, batch {self.batch}"


@lru_cache
def half(shape: Shape, which: int) -> nn.Sequential:
    """One half of the network, the same weights in all processes, the same object for all steps of one."""
    generator = torch.Generator().manual_seed(which)
    layers: list[nn.Module] = []
    for _ in range(shape.layers):
        layer = nn.Linear(shape.width, shape.width)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / shape.width**0.5)
        layers += [layer, nn.Tanh()]
    return nn.Sequential(*layers)


@lru_cache
def inputs(shape: Shape) -> Tensor:
    """A batch."""
    return torch.randn(shape.batch, shape.width, generator=torch.Generator().manual_seed(2))


def second_half(shape: tuple[int, int, int], hidden: Tensor) -> Tensor:
    """Run the second half on this rank."""
    output: Tensor = half(Shape(*shape), 1)(hidden)
    return output


@dataclass(frozen=True)
class Step:
    """Forward by RPC, backward, get_gradients."""

    width: int
    batch: int
    layers: int
    unused: int = 0
    """Calls of the second half whose results nothing uses."""

    @property
    def shape(self) -> Shape:
        """Of the network."""
        return Shape(self.width, self.batch, self.layers)

    @property
    def title(self) -> str:
        """What tables call it."""
        return self.shape.title + (f", {self.unused} unused results" if self.unused else "")

    def run(self, rpc: ModuleType, autograd: ModuleType, **mode: str) -> dict[Tensor, Tensor]:
        """One step; the gradients of rank 0. On rank 0, blocks."""
        shape = (self.width, self.batch, self.layers)
        with autograd.context() as context:
            hidden = half(self.shape, 0)(inputs(self.shape))
            for _ in range(self.unused):
                rpc.rpc_sync(CALLEE, second_half, (shape, hidden))
            loss = rpc.rpc_sync(CALLEE, second_half, (shape, hidden)).square().mean()
            autograd.backward(context, [loss], **mode)
            found: dict[Tensor, Tensor] = autograd.get_gradients(context)
        return found

    def measure(self, rpc: ModuleType, autograd: ModuleType, **mode: str) -> list[float]:
        """Seconds of each of some steps after a few that do not count. Raises: HvlikeError for wrong gradients."""
        self._check(rpc, autograd, **mode)
        start = time.perf_counter()
        for _ in range(_WARM_UPS):
            self.run(rpc, autograd, **mode)
        each = (time.perf_counter() - start) / _WARM_UPS
        taken = []
        for _ in range(max(_FEWEST_STEPS, min(_MOST_STEPS, int(_SECONDS_PER_TURN / each)))):
            start = time.perf_counter()
            found = self.run(rpc, autograd, **mode)
            taken.append(time.perf_counter() - start)
            del found
        return taken

    def _check(self, rpc: ModuleType, autograd: ModuleType, **mode: str) -> None:
        found = self.run(rpc, autograd, **mode)
        for parameter, right in zip(half(self.shape, 0).parameters(), expected(self.shape), strict=True):
            allowed = _TOLERANCE * float(right.abs().max())
            if parameter not in found or not torch.allclose(found[parameter], right, rtol=0.0, atol=allowed):
                raise HvlikeError(f"{autograd.__name__}: wrong gradients of {self.title}")


@lru_cache
def expected(shape: Shape) -> tuple[Tensor, ...]:
    """The gradients of the first half by ordinary autograd."""
    loss = half(shape, 1)(half(shape, 0)(inputs(shape))).square().mean()
    return torch.autograd.grad(loss, list(half(shape, 0).parameters()))


def alone(step: Step) -> list[float]:
    """Seconds of each of some steps in one process, without RPC: what the arithmetic takes."""
    found = []
    parameters = [*half(step.shape, 0).parameters(), *half(step.shape, 1).parameters()]
    for _ in range(_FEWEST_STEPS * 4):
        start = time.perf_counter()
        loss = half(step.shape, 1)(half(step.shape, 0)(inputs(step.shape))).square().mean()
        torch.autograd.grad(loss, parameters)
        found.append(time.perf_counter() - start)
    return found[_FEWEST_STEPS:]


def as_message(step: Step) -> Message:
    """The same for a process beside this one."""
    return {"kind": KIND, **asdict(step)}


def from_message(message: Message) -> Step:
    """The opposite of as_message."""
    return Step(**{key: value for key, value in message.items() if key != "kind"})
