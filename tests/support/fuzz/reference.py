"""What the pages promise of DistributedOptimizer and DistributedDataParallel, in plain torch on simulated ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from support.adasum_reference import adasum
from support.fuzz.documented import DocumentedError
from support.fuzz.programs import Program
from torch import Tensor, nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from support.fuzz.oracle import SimulatedWorld


# By a program's compression or hook, the dtype in which gradients travel.
WIRES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def wire_of(program: Program) -> torch.dtype | None:
    """Return the dtype in which the gradients of a program travel, None for their own."""
    return WIRES.get(program.given.get("compression") or program.given.get("hook"))


def combined(parts: Sequence[Tensor | None], op: str, divisor: int, wire: torch.dtype | None = None) -> Tensor | None:
    """Reduce the gradients of all ranks, where None counts as zeros; None if all are.

    Floats of 16 bits, also those that only travel as such, are added in float32 and rounded once.
    """
    given = [each for each in parts if each is not None]
    if not given:
        return None
    dtype = given[0].dtype
    narrow = wire if wire is not None and dtype in (torch.float32, torch.float64) else dtype
    wide = torch.float32 if narrow in (torch.bfloat16, torch.float16) else narrow
    total = given[0].to(narrow).to(wide, copy=True)
    for each in given[1:]:
        total = total + each.to(narrow).to(wide)
    return (total / divisor if op == "average" else total).to(narrow).to(dtype)


class ReferenceOptimizer:
    """An optimizer that steps on reduced gradients."""

    def __init__(self, inner: Optimizer, world: SimulatedWorld, program: Program, ranks: Sequence[int]) -> None:
        options = program.given
        self.inner, self.world = inner, world
        self.op: str = options.get("op", "average")
        self.passes: int = options.get("backward_passes_per_step", 1)
        self.ranks = ranks
        self.divisor = len(self.ranks)
        self.wire = wire_of(program) if self.divisor > 1 else None
        self.present: Sequence[int] | None = None
        self.local = self.synchronized = False
        self.counted = 0

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def parameters(self) -> list[Tensor]:
        """Return all parameters of all groups."""
        return [each for group in self.inner.param_groups for each in group["params"]]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let passes accumulate."""
        before, self.local = self.local, True
        try:
            yield
        finally:
            self.local = before

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Step as synchronize() has left the gradients; step() here does so by itself."""
        yield

    def after_backward(self, reached: Collection[Tensor], *, reduces: bool) -> None:
        """Count a pass of a step."""
        if reached & set(self.parameters()):
            self.synchronized = False
            self.counted += reduces

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients."""
        self.synchronized = False
        self.counted = 0
        self.inner.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Add parameters."""
        self.inner.add_param_group(group)

    def synchronize(self) -> None:
        """Reduce gradients, once."""
        if self.synchronized or self.op == "adasum" or self.world.rank not in self.ranks:
            return
        self.synchronized = True
        parameters = self.parameters()
        mine = [None if each.grad is None else each.grad.detach().clone() for each in parameters]
        everybody = self.world.gather(mine, self.ranks)
        for place, parameter in enumerate(parameters):
            parameter.grad = combined([each[place] for each in everybody], self.op, self.divisor, self.wire)

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Reduce, then step."""

        def evaluate() -> Any:
            assert closure is not None
            loss = closure()
            self.synchronize()
            if self.world.rank not in self.ranks or self.op == "adasum":
                return loss
            losses = self.world.gather(loss.detach().clone(), self.ranks)
            return combined(losses, self.op, self.divisor)

        # One rank alone makes the plain step.
        of_deltas = self.op == "adasum" and self.world.rank in self.ranks and len(self.ranks) > 1
        before = [each.detach().clone() for each in self.parameters()] if of_deltas else []
        if closure is None:
            self.synchronize()
            self.inner.step()
        else:
            self.inner.step(evaluate)
        if before:
            self._take_adasum(before)
        self.counted = 0
        self.synchronized = False

    def stand_in(self) -> None:
        """Contribute nothing to a step of the others."""
        if self.op == "adasum":
            self.world.gather([torch.zeros_like(each) for each in self.parameters()], self.ranks)
        else:
            self.world.gather([None] * len(self.parameters()), self.ranks)

    def _take_adasum(self, starts: list[Tensor]) -> None:
        parameters = self.parameters()
        deltas = [each.detach() - start for each, start in zip(parameters, starts, strict=True)]
        everybody = self.world.gather(deltas, self.ranks)
        for place, (parameter, start) in enumerate(zip(parameters, starts, strict=True)):
            parts = [each[place].reshape(-1) for each in everybody]
            parameter.data.copy_(start + adasum(parts).to(start.dtype).view(start.shape))

    def for_scaler(self) -> Optimizer:
        """Return the plain optimizer, with reduced gradients."""
        self.synchronize()
        return self.inner


class ReferenceModule(nn.Module):
    """A module whose gradients are averages when a backward pass has ended."""

    def __init__(self, module: nn.Module, world: SimulatedWorld, program: Program, ranks: Sequence[int]) -> None:
        super().__init__()
        options = program.given
        self.module, self.world = module, world
        self.finds_unused = options.get("find_unused_parameters") or options.get("static_graph")
        self.sends_buffers = options.get("broadcast_buffers", True)
        self.registered = list(module.parameters())
        self.ranks = ranks
        self.divisor = len(self.ranks)
        self.wire = wire_of(program) if self.divisor > 1 else None
        # The ranks that have inputs, inside of a Join context.
        self.present: Sequence[int] | None = None
        self.local = self.interrupted = False
        self.buffers_are_due = True
        if not any(each.requires_grad for each in module.parameters()):
            raise DocumentedError("nothing to train")
        if options.get("init_sync", True):
            self._take_start()
        self.reached: set[Tensor] = set()
        self.missing: set[Tensor] | None = None
        # What required a gradient when the last forward pass ended.
        self.expected: set[Tensor] = set()

    def _take_start(self) -> None:
        """Begin with the first rank's parameters, and its buffers where buffers are sent."""
        if self.world.rank not in self.ranks:
            return
        values = [*self.module.parameters(), *(self.module.buffers() if self.sends_buffers else ())]
        values = [each for each in values if each.layout is torch.strided]
        first = self.world.gather([each.detach().clone() for each in values], self.ranks)[0]
        with torch.no_grad():
            for each, value in zip(values, first, strict=True):
                each.copy_(value)

    def __getstate__(self) -> dict[str, Any]:
        # A copy begins anew.
        return self.__dict__ | {"missing": None, "interrupted": False, "reached": set()}

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let passes through forwards made inside accumulate."""
        before, self.local = self.local, True
        try:
            yield
        finally:
            self.local = before

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Send the first rank's buffers, run the module."""
        if torch.is_grad_enabled() and self.world.rank in self.ranks:
            missing, interrupted = self.missing, self.interrupted
            if not self.local:
                self.missing, self.interrupted = None, False
                if interrupted:
                    raise DocumentedError("interrupted backward")
                if missing and not self.finds_unused:
                    raise DocumentedError("unused parameters")
            if self.buffers_are_due and self.sends_buffers:
                self._send_buffers()
        output = self.module(*inputs, **keywords)
        if torch.is_grad_enabled():
            self.buffers_are_due = not self.local
            self.expected = {each for each in self.registered if each.requires_grad}
        return output

    def _send_buffers(self) -> None:
        buffers = dict(self.module.named_buffers())
        if self.world.rank not in self.ranks:
            return
        everybody = self.world.gather({name: each.clone() for name, each in buffers.items()}, self.ranks)
        first = everybody[0 if self.present is None else max(self.present)]
        for name, buffer in buffers.items():
            if buffer.layout is torch.strided:
                buffer.copy_(first[name])

    def stand_in(self) -> None:
        """Take part in a step of the others without inputs."""
        if self.sends_buffers and self.buffers_are_due:
            self._send_buffers()
        self.buffers_are_due = True
        if any(each.requires_grad for each in self.registered):
            self.world.gather([(False, None)] * len(self.registered), self.ranks)

    def after_backward(self, reached: Collection[Tensor], *, reduces: bool) -> None:
        """Average what has been accumulated, if this pass reduces."""
        self.reached |= set(reached)
        if not reduces:
            return
        mine = [
            (each in self.reached, None if each.grad is None else each.grad.detach().clone())
            for each in self.registered
        ]
        if self.world.rank not in self.ranks:
            self.reached = set()
            return
        everybody = self.world.gather(mine, self.ranks)
        # What was frozen since then accumulates nothing.
        unreached = {each for each in self.expected if each.requires_grad and each not in self.reached}
        self.missing = unreached if self.missing is None else self.missing & unreached
        self.reached = set()
        for place, parameter in enumerate(self.registered):
            parts = [each[place] for each in everybody]
            total = combined([gradient for _, gradient in parts], "average", self.divisor, self.wire)
            if any(used for used, _ in parts):
                parameter.grad = total


class UpdatedInBackward:
    """An optimizer whose update is part of the backward pass, and whose step() does nothing."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def step(self) -> None:
        """Do nothing."""

    def update(self) -> None:
        """What a backward pass that has reduced does."""
        self.inner.step()
