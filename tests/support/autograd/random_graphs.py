"""Runs programs: in one process, where torch's own autograd says what is right, or over workers by RPC."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol, cast

import torch
from support.autograd.operations import CHANGES, OPERATIONS, SIDE, bend, lookup
from support.autograd.programs import (
    Apply,
    Call,
    ChangeInPlace,
    Fetch,
    Hook,
    Lookup,
    Program,
    Refer,
    Remote,
    Run,
    Start,
    Step,
    Use,
    Wait,
)
from support.autograd.random_programs import draw_program
from torch import Tensor

from hvlike.system.system import system

Key = tuple[int, int, int]
"""What draw_program is given."""
Results = tuple[list[Tensor], list[Any]]
Gradients = list[list[Tensor | None]]
"""By worker and leaf."""


class Ways(Protocol):
    """How a routine gets at what is not its own."""

    def leaf(self, worker: int, leaf: int) -> Tensor:
        """A leaf of the worker on which it runs."""

    def call(self, routine: int, values: list[Tensor], references: list[Any]) -> Results:
        """Run a routine where it belongs."""

    def start(self, routine: int, values: list[Tensor], references: list[Any]) -> Callable[[], Results]:
        """The same; what is returned waits for it."""

    def remote(self, routine: int, values: list[Tensor], references: list[Any]) -> Any:
        """Run a routine where it belongs and refer to its values."""

    def settle(self, reference: Any) -> None:
        """Wait until the routine behind a reference has run."""

    def refer(self, worker: int, values: list[Tensor]) -> Any:
        """A reference to values of the worker on which the routine runs."""

    def fetch(self, worker: int, reference: Any) -> list[Tensor]:
        """The values of a reference on the worker on which the routine runs."""


class Performance:
    """One run of a routine."""

    def __init__(self, program: Program, routine: int, given: Results, ways: Ways) -> None:
        self._routine = program.routines[routine]
        self._ways = ways
        self._started: list[Callable[[], Results]] = []
        self._created: list[Any] = []
        self.values, self.references = list(given[0]), list(given[1])

    def run(self) -> Results:
        """Take all steps; returns what the routine returns."""
        for step in self._routine.steps:
            self._step(step)
        for reference in self._created:
            self._ways.settle(reference)
        values = [self.values[place] for place in self._routine.values]
        return values, [self.references[place] for place in self._routine.references]

    def _step(self, step: Step) -> None:
        worker = self._routine.worker
        if isinstance(step, Use):
            self.values.append(self._ways.leaf(worker, step.leaf))
        elif isinstance(step, Apply):
            made = OPERATIONS[step.operation].run(*self._of(step.inputs))
            self.values += [made] if isinstance(made, Tensor) else made
        elif isinstance(step, Lookup):
            self.values.append(lookup(self.values[step.table]))
        elif isinstance(step, ChangeInPlace):
            CHANGES[step.change].run(self.values[step.target], *self._of(step.inputs))
        elif isinstance(step, Hook):
            bent(self.values[step.target])
        elif isinstance(step, Call):
            self._add(self._ways.call(step.routine, *self._arguments(step)))
        elif isinstance(step, Start):
            self._started.append(self._ways.start(step.routine, *self._arguments(step)))
        elif isinstance(step, Wait):
            self._add(self._started[step.started]())
        elif isinstance(step, Remote):
            self._created.append(self._ways.remote(step.routine, *self._arguments(step)))
            self.references.append(self._created[-1])
        elif isinstance(step, Refer):
            self.references.append(self._ways.refer(worker, self._of(step.values)))
        elif isinstance(step, Fetch):
            self.values += self._ways.fetch(worker, self.references[step.reference])

    def _of(self, places: Sequence[int]) -> list[Tensor]:
        return [self.values[place] for place in places]

    def _arguments(self, step: Run) -> Results:
        return self._of(step.values), [self.references[place] for place in step.references]

    def _add(self, results: Results) -> None:
        self.values += results[0]
        self.references += results[1]


def bent(tensor: Tensor) -> None:
    """Have a hook bend the gradient of a tensor."""
    # torch renews the grad_fn of a view whose base has changed when it is read; register_hook() of 2.9 to 2.14
    # does that halfway through and crashes (https://github.com/pytorch/pytorch/issues/196459).
    _ = tensor.grad_fn
    cast(Any, tensor).register_hook(bend)


def total(value: Tensor) -> Tensor:
    """The sum of a value, with weights that tell its elements apart."""
    return (value * torch.linspace(0.5, 1.5, SIDE * SIDE, dtype=value.dtype).view(SIDE, SIDE)).sum()


def make_leaves(key: Key) -> list[list[Tensor]]:
    """All leaves of a program, by worker; the same numbers for the same key."""
    generator = torch.Generator().manual_seed(hash(key) % 2**31)
    made = []
    for about in draw_program(*key).leaves:
        made.append([torch.rand(SIDE, SIDE, generator=generator, dtype=torch.float64) * 2 - 1 for _ in about])
        for leaf, tensor in zip(about, made[-1], strict=True):
            tensor.requires_grad_(leaf.grad)
            if leaf.hooked:
                bent(tensor)
    return made


# -- in one process -----------------------------------------------------------------------------------


class Crossing(torch.autograd.Function):
    """A message: copies of tensors, and a note when a gradient comes back."""

    @staticmethod
    def forward(ctx: Any, number: int, crossed: list[int], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.number, ctx.crossed = number, crossed
        return tuple(tensor.clone() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        ctx.crossed.append(ctx.number)
        return None, None, *gradients


@dataclass(frozen=True)
class Held:
    """What stands for an RRef in one process."""

    worker: int
    values: list[Tensor]


@dataclass
class OneProcess:
    """All workers in this process; messages copy."""

    key: Key
    leaves: list[list[Tensor]] = field(default_factory=list)
    messages: int = 0
    """That have carried a tensor which requires grad."""
    crossed: list[int] = field(default_factory=list)
    """The messages through which the last pass has come."""
    between: list[set[int]] = field(default_factory=list)
    """The two workers of each message."""
    here: int = 0
    """The worker that runs."""

    def __post_init__(self) -> None:
        self.program = draw_program(*self.key)
        self.leaves = make_leaves(self.key)
        self.here = self.program.routines[0].worker

    def leaf(self, worker: int, leaf: int) -> Tensor:
        return self.leaves[worker][leaf]

    def call(self, routine: int, values: list[Tensor], references: list[Any]) -> Results:
        caller = self.here
        returned, further = self._serve(routine, values, references)
        return self.send(returned, self.program.routines[routine].worker, caller), further

    def _serve(self, routine: int, values: list[Tensor], references: list[Any]) -> Results:
        caller, self.here = self.here, self.program.routines[routine].worker
        results = Performance(self.program, routine, (self.send(values, caller, self.here), references), self).run()
        self.here = caller
        return results

    def start(self, routine: int, values: list[Tensor], references: list[Any]) -> Callable[[], Results]:
        results = self.call(routine, values, references)
        return lambda: results

    def remote(self, routine: int, values: list[Tensor], references: list[Any]) -> Held:
        returned, _ = self._serve(routine, values, references)
        return Held(self.program.routines[routine].worker, returned)

    def settle(self, reference: Held) -> None:
        """It has."""

    def refer(self, worker: int, values: list[Tensor]) -> Held:
        return Held(worker, values)

    def fetch(self, worker: int, reference: Held) -> list[Tensor]:
        own = worker == reference.worker
        return reference.values if own else self.send(reference.values, reference.worker, worker)

    def send(self, values: list[Tensor], source: int, target: int) -> list[Tensor]:
        """The same values on the other side of a message; one that is there twice stays one."""
        graded = {id(each): each for each in values if each.requires_grad}
        copies = {id(each): each.clone() for each in values if not each.requires_grad}
        if graded:
            self.messages += 1
            self.between.append({source, target})
            copies |= zip(graded, cast(Any, Crossing).apply(self.messages, self.crossed, *graded.values()), strict=True)
        return [copies[id(each)] for each in values]

    @property
    def is_all_used(self) -> bool:
        """Whether the last pass has come through all messages of which its workers know: those with one of them, and
        with it the other one.
        """
        known = {self.here}
        while more := set().union(*(each for each in self.between if each & known)) - known:
            known |= more
        return all(number in self.crossed for number, each in enumerate(self.between, start=1) if each & known)


@dataclass(frozen=True)
class Expected:
    """What is right for a program."""

    gradients: Gradients
    messages: int
    every_result_is_used: bool
    """In every pass, as far as its workers know: FAST can run it."""


def run_in_one_process(key: Key) -> Expected:
    """Run a program on torch's own autograd."""
    ways = OneProcess(key)
    program = ways.program
    first = Performance(program, 0, ([], []), ways)
    first.run()
    distant = None
    if program.distant is not None:
        (value,) = ways.send([first.values[program.distant[1]]], ways.here, program.distant[0])
        distant = total(value)
    every = True
    gradients: Gradients = [[None] * len(leaves) for leaves in ways.leaves]
    for each in program.passes:
        ways.crossed.clear()
        roots = [distant] if each.distant and distant is not None else [total(first.values[at]) for at in each.roots]
        torch.autograd.backward(roots, retain_graph=each.retain)
        every &= ways.is_all_used
        # Added up here: torch 2.13 adds sparse ones in place, and counts one twice that shares memory with another.
        for sums, leaves in zip(gradients, ways.leaves, strict=True):
            for place, leaf in enumerate(leaves):
                if leaf.grad is not None:
                    sums[place] = _dense(sums[place]) + _dense(leaf.grad)
                    leaf.grad = None
    return Expected(gradients, ways.messages, every)


# -- over workers ------------------------------------------------------------------------------------


class Modules:
    """The RPC and the distributed autograd that this process uses: hvlike's, or torch's to check the programs."""

    rpc: ModuleType
    autograd: ModuleType


_LEAVES: dict[Key, list[list[Tensor]]] = {}


def leaves_here(key: Key) -> list[list[Tensor]]:
    """The leaves of a program in this process, made when they are first asked for."""
    if key not in _LEAVES:
        # Of two threads that come first, one makes those that count.
        _LEAVES.setdefault(key, make_leaves(key))
    return _LEAVES[key]


def forget_leaves() -> None:
    """No program that has run on this worker will run again."""
    _LEAVES.clear()


@dataclass(frozen=True)
class OverWorkers:
    """Each routine on its worker."""

    key: Key

    def leaf(self, worker: int, leaf: int) -> Tensor:
        return leaves_here(self.key)[worker][leaf]

    def call(self, routine: int, values: list[Tensor], references: list[Any]) -> Results:
        arguments = self.key, routine, values, references
        results: Results = Modules.rpc.rpc_sync(self._worker(routine), serve, arguments)
        return results

    def start(self, routine: int, values: list[Tensor], references: list[Any]) -> Callable[[], Results]:
        future = Modules.rpc.rpc_async(self._worker(routine), serve, (self.key, routine, values, references))
        wait: Callable[[], Results] = future.wait
        return wait

    def remote(self, routine: int, values: list[Tensor], references: list[Any]) -> Any:
        return Modules.rpc.remote(self._worker(routine), serve_values, (self.key, routine, values, references))

    def settle(self, reference: Any) -> None:
        if reference.is_owner():
            reference.local_value()
        # The owner confirms when it is done; nothing may run on when the context has gone.
        while not (reference.is_owner() or reference.confirmed_by_owner()):
            system.sleep(1e-4)

    def refer(self, worker: int, values: list[Tensor]) -> Any:
        return Modules.rpc.RRef(values)

    def fetch(self, worker: int, reference: Any) -> list[Tensor]:
        values: list[Tensor] = reference.to_here()
        return values

    def _worker(self, routine: int) -> int:
        return draw_program(*self.key).routines[routine].worker


def serve(key: Key, routine: int, values: list[Tensor], references: list[Any]) -> Results:
    """Run a routine of a program on this worker."""
    return Performance(draw_program(*key), routine, (values, references), OverWorkers(key)).run()


def serve_values(key: Key, routine: int, values: list[Tensor], references: list[Any]) -> list[Tensor]:
    """The same for who wants its values only."""
    return serve(key, routine, values, references)[0]


def gradients_here(key: Key, worker: int, context: int) -> list[Tensor | None]:
    """The gradients of this worker's leaves in a context."""
    found = Modules.autograd.get_gradients(context)
    return [found.get(leaf) for leaf in leaves_here(key)[worker]]


def run_over_workers(key: Key, **mode: str) -> Gradients:
    """Run a program from its home, which is this worker. mode: for the passes that begin here."""
    program, rpc, autograd = draw_program(*key), Modules.rpc, Modules.autograd
    with autograd.context() as context:
        first = Performance(program, 0, ([], []), OverWorkers(key))
        first.run()
        distant = None
        if program.distant is not None:
            distant = rpc.remote(program.distant[0], total, (first.values[program.distant[1]],))
        for each in program.passes:
            if each.distant and distant is not None:
                distant.backward(context, each.retain)
            else:
                roots = [total(first.values[at]) for at in each.roots]
                autograd.backward(context, roots, retain_graph=each.retain, **mode)
        workers = range(len(program.leaves))
        return [rpc.rpc_sync(worker, gradients_here, (key, worker, context)) for worker in workers]


def difference(found: Gradients, expected: Gradients) -> float:
    """The largest difference, as a part of the largest gradient where that is above 1; none counts as zeros."""
    worst, largest = 0.0, 1.0
    for mine, right in zip(found, expected, strict=True):
        for one, other in zip(mine, right, strict=True):
            left, correct = _dense(one), _dense(other)
            if not torch.isfinite(left).all():
                return float("inf")
            worst = max(worst, float((left - correct).abs().max()))
            largest = max(largest, float(correct.abs().max()))
    return worst / largest


def _dense(gradient: Tensor | None) -> Tensor:
    if gradient is None:
        return torch.zeros(SIDE, SIDE, dtype=torch.float64)
    return gradient.to_dense() if gradient.is_sparse else gradient
