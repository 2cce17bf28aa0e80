"""One rank of a program: its model, its optimizer, and what has been seen of them."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, Protocol

import torch
from support.fuzz.documented import cause_of
from support.fuzz.models import Network, make_batch, make_network
from support.fuzz.outcomes import Failure, Outcome, Value
from support.fuzz.programs import Program
from torch import Tensor, nn
from torch.optim import Optimizer

LR = 0.05
TRACE_LINES = 8


class World(Protocol):
    """What the program is wrapped in: hvlike, torch's own, or the simulated ranks of the oracle."""

    rank: int
    size: int

    def wrap(self, training: Training) -> None:
        """Set `model` and `optimizer` of the training."""

    def backward(self, training: Training, loss: Tensor, *, reduces: bool, **options: bool) -> None:
        """Run a backward pass. reduces: whether one that ends in the parameters of a wrapped module reduces."""

    def no_sync(self, training: Training) -> Any:
        """Return the context of local passes."""

    def uneven(
        self, training: Training, counts: Sequence[int], step: Callable[[int], None], *, by_active: bool
    ) -> None:
        """Make so many steps on each rank in a Join context."""

    def average(self, tensors: list[Tensor]) -> None:
        """Exchange tensors by hand."""

    def clip(self, training: Training, norm: float) -> None:
        """Clip the gradients of the optimizer."""

    def rewrap(self, training: Training) -> None:
        """Set `model` and `optimizer` to new wrappers."""

    def resume(self, training: Training, ranks: Sequence[int]) -> None:
        """Go on among these ranks with the state of the first of those that have trained together."""

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function compiled."""

    def about_to_step(self, training: Training) -> None:
        """Say so where a step makes no sense."""

    def for_scaler(self, training: Training) -> Any:
        """Return what a GradScaler is given."""

    def for_scheduler(self, training: Training) -> Any:
        """Return what a schedule is given."""

    def state(self, training: Training) -> dict[int, dict[str, Any]]:
        """Return the state of the optimizer, by the places of its parameters."""


class Training:
    """The state of a rank."""

    def __init__(self, world: World, program: Program, network: Network | None = None, label: str = "") -> None:
        """label: stands before the names of parameters, where there are several trainings."""
        self.label = label
        self.world = world
        # Those that train together.
        self.ranks: Sequence[int] = program.given.get("process_set") or tuple(range(world.size))
        # Parameters whose data has another shape than when they were wrapped.
        self.resized: set[Tensor] = set()
        self.program = program
        self.network = network or make_network(program.parts)
        self.model: nn.Module = self.network
        self.optimizer: Any = None
        self.scheduler: Any = None
        self.earlier: list[Any] = []
        self.scaler: Any = None
        self.outcome = Outcome()
        self.number = 0

    def run(self) -> Outcome:
        """Do all actions; an exception ends the program."""
        for _ in self.advance():
            pass
        return self.outcome

    def advance(self) -> Iterator[None]:
        """Do one action after the other."""
        self.number = -1
        try:
            self.world.wrap(self)
            yield
            for number, action in enumerate(self.program.actions):
                self.number = number
                action.do(self)
                yield
            self.number += 1
            self.see("end")
            self.see_state()
        except Exception as error:
            self.outcome.failure = Failure(
                self.number,
                type(error).__name__,
                str(error),
                tuple(each.__name__ for each in type(error).__mro__),
                "\n".join(traceback.format_exc().splitlines()[-TRACE_LINES:]),
            )

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """Return this rank's rows and words."""
        return make_batch(number, self.world.rank)

    def train(self, rows: Tensor, words: Tensor, set_to_none: bool = True) -> None:
        """Make one plain step."""
        self.optimizer.zero_grad(set_to_none=set_to_none)
        output = self.model(rows.to(self.network.last.weight.dtype), words)
        loss = output.square().mean()
        if loss.requires_grad:
            self.world.backward(self, loss, reduces=True)
        self.optimizer.step()

    def see(self, label: str, *, gradients: bool = True) -> None:
        """Remember parameters, gradients and buffers as they are now."""
        # ZeRO alone leaves each gradient on one rank.
        gradients = gradients and self.program.kind != "zero alone"
        values: dict[str, Value | None] = {}
        for name, parameter in self.network.named_parameters():
            if is_lazy(parameter):
                continue
            values[name] = Value.of(parameter)
            if gradients:
                values[f"{name}.grad"] = Value.of(parameter.grad)
        for name, buffer in self.network.named_buffers():
            values[f"buffer {name}"] = Value.of(buffer)
        self.outcome.seen.append((f"action {self.number} ({label})", values))

    def see_error(self, error: Exception) -> None:
        """Remember a documented error that the program has caught; others go on."""
        cause = cause_of(error)
        if cause is None:
            raise error
        # What is left of an interrupted pass is of no use.
        self.model.zero_grad()
        self.outcome.seen.append((f"action {self.number} ({cause})", {}))

    def see_state(self) -> None:
        """Remember what the optimizer keeps for each parameter."""
        values: dict[str, Value | None] = {}
        for place, kept in self.world.state(self).items():
            for name, value in kept.items():
                if isinstance(value, Tensor | float | int):
                    values[f"state {place} {name}"] = Value.of(torch.as_tensor(value))
        self.outcome.seen.append((f"action {self.number} (state)", values))


def is_lazy(tensor: Tensor) -> bool:
    """Whether it has no shape yet."""
    return isinstance(tensor, nn.parameter.UninitializedParameter)


def start_differently(network: nn.Module, rank: int) -> None:
    """Give each rank other values to start with; those of rank 0 stay."""
    with torch.no_grad():
        for each in (*network.parameters(), *network.buffers()):
            if not is_lazy(each) and each.layout is torch.strided:
                each.add_(rank)


def run_beside(first: Training, second: Training, *, threads: bool) -> tuple[Outcome, Outcome]:
    """Run two trainings at once."""
    if threads:
        thread = threading.Thread(target=second.run)
        thread.start()
        first.run()
        thread.join()
    else:
        for _ in zip_longest(first.advance(), second.advance()):
            pass
    return first.outcome, second.outcome


def make_optimizer(name: str, parameters: Any) -> Optimizer:
    """Return a plain optimizer of torch by its name in a program."""
    kind, options = OPTIMIZERS[name]
    return kind(parameters, lr=LR, **options)


# Dividing by a gradient's own size makes the rounding of a tiny one as large as any update: hence `eps`.
OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "decay": (torch.optim.SGD, {"weight_decay": 0.1}),
    "adam": (torch.optim.Adam, {"eps": 0.01}),
    "adamw": (torch.optim.AdamW, {"eps": 0.01, "weight_decay": 0.5}),
    # Losses that hardly change end nothing.
    "lbfgs": (torch.optim.LBFGS, {"max_iter": 3, "history_size": 2, "tolerance_grad": 0.0, "tolerance_change": 0.0}),
}
