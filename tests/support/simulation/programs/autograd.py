"""Random graphs over workers, whose gradients are those of one process, and the steps of distributed optimizers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from support.autograd.random_graphs import (
    Key,
    Modules,
    difference,
    forget_leaves,
    run_in_one_process,
    run_over_workers,
)
from support.autograd.random_programs import draw_program
from support.simulation.programs.rpc import worker
from torch import Tensor

from hvlike import autograd, rpc
from hvlike.system.system import of_process, system

MODES = ("safe", "smart", "fast")
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Graph:
    """One forward pass with its backwards, from its home."""

    key: Key
    mode: str

    def check(self) -> None:
        """Run it over the workers and in this process. Any number of them may run at a time."""
        expected = run_in_one_process(self.key)
        mode = self.mode
        if mode == "fast" and not expected.every_result_is_used:
            # FAST needs every result. What an RRef begins is always SAFE, so that such a program might run.
            if not any(each.distant for each in draw_program(*self.key).passes):
                self._fail_fast()
            mode = "safe"
        apart = difference(run_over_workers(self.key, mode=mode), expected.gradients)
        assert apart < TOLERANCE, f"{self.key} in mode {mode} is off by {apart}"

    def _fail_fast(self) -> None:
        try:
            run_over_workers(self.key, mode="fast")
        except RuntimeError as error:
            if "fast" not in str(error):
                raise
            return
        raise AssertionError(f"{self.key}: FAST has taken a program with unused results")


class Model:
    """The parameters of a rank."""

    def __init__(self) -> None:
        self.parameters: list[Tensor] = []


model = of_process(Model)


class Broken(torch.autograd.Function):
    """A function whose backward fails."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("broken on purpose")


def through_broken(values: Tensor, ranks: Sequence[int], culprit: int) -> Tensor:
    """Come through these ranks, the one with this place in the path is broken."""
    here = values * torch.ones(3, dtype=torch.double, requires_grad=True)
    if culprit == 0:
        broken: Any = Broken.apply
        here = broken(here)
    if not ranks:
        return here
    further: Tensor = rpc.rpc_sync(worker(ranks[0]), through_broken, (here, ranks[1:], culprit - 1))
    return further


def fail_in_backward(path: Sequence[int], culprit: int) -> None:
    """Run a backward that fails on another worker."""
    with autograd.context() as context:
        loss = rpc.rpc_sync(worker(path[0]), through_broken, (start(), path[1:], culprit)).sum()
        try:
            autograd.backward(context, [loss])
        except (RuntimeError, ValueError) as error:
            if "broken on purpose" not in str(error):
                raise
            return
    raise AssertionError(f"a backward through {path} that fails at {culprit} has not failed")


def make_parameter(value: float) -> Any:
    """Make a parameter here; returns its RRef."""
    parameter = torch.full((3,), value, dtype=torch.double, requires_grad=True)
    model.parameters.append(parameter)
    return rpc.RRef(parameter)


def through(values: Tensor, ranks: Sequence[int]) -> Tensor:
    """Multiply by the parameter of this rank, and then by those of the others."""
    here = values * model.parameters[0]
    if not ranks:
        return here
    further: Tensor = rpc.rpc_sync(worker(ranks[0]), through, (here, ranks[1:]))
    return further


@dataclass
class Autograd:
    """Graphs of every rank, all at the same time, and steps of an optimizer whose parameters are everywhere."""

    graphs: list[list[Graph]]
    """By rank; each runs its own one after the other, or in two threads."""
    two_threads: bool
    paths: list[list[int]]
    """For each step of the optimizer: the ranks that the forward pass comes through."""
    broken: list[tuple[list[int], int]]
    """For each rank: a path through which backward fails, and where; empty: none."""

    @classmethod
    def draw(cls, seed: int, size: int) -> Autograd:
        """Draw one."""
        draw = random.Random(seed)
        # What earlier jobs have left.
        forget_leaves()
        graphs = [
            [Graph((1000 * seed + 10 * rank + number, size, rank), draw.choice(MODES)) for number in range(2)]
            for rank in range(size)
        ]
        graphs = [mine[: draw.randint(0, 2)] for mine in graphs]
        paths = [draw.choices(range(size), k=draw.randint(1, 3)) for _ in range(draw.choice([0, 1, 2]))]
        broken = [(draw.choices(range(size), k=draw.choice([0, 0, 1, 3])), draw.randrange(3)) for _ in range(size)]
        broken = [(path, min(culprit, len(path) - 1)) for path, culprit in broken]
        return cls(graphs, draw.random() < 0.3, paths, broken)

    def __call__(self, hvd: Any, rank: int) -> None:
        Modules.rpc, Modules.autograd = rpc, autograd
        size = len(self.graphs)
        # Each routine of a graph may hold a thread.
        rpc.init_rpc(worker(rank), num_worker_threads=16 * size)
        rpc.api._set_leak_checking(True)
        if self.broken[rank][0]:
            fail_in_backward(*self.broken[rank])
        self._check(self.graphs[rank])
        if self.paths:
            self._train(rank, size)
        rpc.shutdown()
        hvd.shutdown()

    def _check(self, graphs: Sequence[Graph]) -> None:
        errors: list[Exception] = []

        def check(graph: Graph) -> None:
            try:
                graph.check()
            except Exception as error:
                errors.append(error)

        threads = [
            system.Thread(target=check, args=(each,), name="program", daemon=True)
            for each in graphs[1:]
            if self.two_threads
        ]
        for thread in threads:
            thread.start()
        for graph in graphs if not threads else graphs[:1]:
            check(graph)
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def _train(self, rank: int, size: int) -> None:
        """Rank 0 steps the parameters of all, beside the graphs of others."""
        if rank:
            return
        parameters = [rpc.rpc_sync(worker(each), make_parameter, (1.0 + each,)) for each in range(size)]
        optimizer = rpc.DistributedOptimizer(torch.optim.SGD, parameters, lr=0.01)
        for path in self.paths:
            with autograd.context() as context:
                loss = through_first(path).sum()
                autograd.backward(context, [loss])
                optimizer.step(context)
        for found, wanted in zip([each.to_here() for each in parameters], self.alone(size), strict=True):
            assert torch.allclose(found, wanted), f"parameters: {found}, expected {wanted}"

    def alone(self, size: int) -> list[Tensor]:
        """The parameters that one process comes to."""
        parameters = [torch.full((3,), 1.0 + each, dtype=torch.double, requires_grad=True) for each in range(size)]
        optimizer = torch.optim.SGD(parameters, lr=0.01)
        for path in self.paths:
            optimizer.zero_grad()
            values = start()
            for each in path:
                values = values * parameters[each]
            values.sum().backward()
            optimizer.step()
        return [each.detach() for each in parameters]


def start() -> Tensor:
    """What the forward pass begins with."""
    return torch.linspace(0.5, 1.5, 3, dtype=torch.double)


def through_first(path: Sequence[int]) -> Tensor:
    """The forward pass through the parameters of these ranks."""
    found: Tensor = rpc.rpc_sync(worker(path[0]), through, (start(), path[1:]))
    return found
