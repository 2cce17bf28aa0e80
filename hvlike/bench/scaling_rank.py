"""What bench scaling runs on every rank of the jobs it starts: steps of a small model, counted and timed."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import hvlike
from hvlike.bench.scaling_report import Rank, Way, summarise
from hvlike.collectives.context import current

PLANNED, NEGOTIATED = "planned", "negotiated"
_WARMUPS = 3


def main(arguments: list[str]) -> int:
    """Measure both ways and print them on rank 0. Collective. Returns the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    hvlike.init()
    ways = {
        name: measure(make(options.layers, options.width), options.steps)
        for name, make in ((PLANNED, planned), (NEGOTIATED, negotiated))
    }
    if hvlike.rank() == 0:
        nodes = len(current().world.nodes)
        print(json.dumps({"ranks": hvlike.size(), "nodes": nodes, "ways": {k: v.as_json() for k, v in ways.items()}}))
    hvlike.shutdown()
    return 0


def planned(layers: int, width: int) -> Callable[[], None]:
    """A step of hvlike.DistributedOptimizer."""
    model, optimizer, batch = _network(layers, width)
    distributed = hvlike.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    def step() -> None:
        distributed.zero_grad()
        model(batch).square().mean().backward()
        distributed.step()

    return step


def negotiated(layers: int, width: int) -> Callable[[], None]:
    """The same step with a named allreduce for every gradient, all in flight at once."""
    model, optimizer, batch = _network(layers, width)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        handles = [
            hvlike.allreduce_async_(parameter.grad, name=name)
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        ]
        for handle in handles:
            hvlike.synchronize(handle)
        optimizer.step()

    return step


def measure(step: Callable[[], None], steps: int) -> Way:
    """Take steps, count what they send and time them. Collective; the same on every rank."""
    for _ in range(_WARMUPS):
        step()
    traffic = current().fabric.traffic
    before = traffic.snapshot()
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    mine = Rank(traffic.snapshot() - before, seconds)
    everybody: list[Rank] = hvlike.allgather_object(mine, name="bench scaling")
    return summarise(everybody, steps)


def _network(layers: int, width: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    torch.manual_seed(1 + hvlike.rank())
    return model, torch.optim.SGD(model.parameters(), lr=1e-3), torch.randn(4, width)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
