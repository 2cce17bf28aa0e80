"""What a training step costs on many ranks by the LogGP model: pure functions of constants, and their measurement.

Across nodes it is the model with which reductions choose their way (backends/network/cost_model.py). Added here: memory
inside a node has constants of its own; a coordinator does some work for every message it gets; the ranks of a node
share its link. Everything is counted in seconds and bytes, and nothing is assumed to overlap.

bench simulate calls `measure` on two ranks for the constants.
"""

from __future__ import annotations

import math
import pickle
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

import hvlike
from hvlike.backends.network.cost_model import NetworkConstants, best, message
from hvlike.bench.harness.comparison import timed
from hvlike.bench.harness.raw_mpi import RawMpi
from hvlike.collectives.controller.coordinator import Coordinator, ResponseCache, ResponseList
from hvlike.collectives.controller.trace import Trace
from hvlike.collectives.health.stall_inspector import StallInspector, StallLimits
from hvlike.collectives.requests.message_table import Response
from hvlike.collectives.requests.request import RequestSpec
from hvlike.collectives.session.context import current
from hvlike.transport.messages.traffic import Topic

_MIB = 1 << 20
_MEMBERS = 100  # Ranks that the coordinator is told of
_FEW, _MANY = 1, 101
_REPETITIONS = 7
_LIMIT_SECONDS = 30.0


@dataclass(frozen=True)
class Constants(NetworkConstants):
    memory: float  # Seconds per byte for a reduction over two ranks of a node, in shared memory
    memory_floor: float  # Seconds for a reduction of nothing over two ranks of a node
    take: float  # Seconds of the coordinator for a message with the requests of a rank
    take_entry: float  # Additional seconds for every tensor in it
    tell: float  # Seconds of the coordinator for sending a message with its responses
    tell_entry: float
    entry_bytes: float  # Size of such a message for every tensor


@dataclass(frozen=True)
class Workload:
    nbytes: float  # Of all gradients
    tensors: int
    compute: float  # Seconds of the step without communication
    rounds: int = 1  # How many request messages a rank sends in a negotiated step


@dataclass(frozen=True)
class Job:
    """How many ranks there are, and how many of them share a node."""

    ranks: int
    ranks_per_node: int

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.ranks_per_node)

    @property
    def local(self) -> int:
        return min(self.ranks, self.ranks_per_node)


# A reduction over n participants of so many bytes each, with so many participants behind one link.
Across = Callable[[Constants, int, float, int], float]


def ring(c: Constants, n: int, nbytes: float, sharing: int = 1) -> float:
    """Reduce-scatter and allgather around a ring: 2 (n - 1) steps, each waits for the one before."""
    steps = 2 * (n - 1)
    return steps * max(c.gap, message(c, nbytes / n, sharing)) + (n - 1) / n * nbytes * c.fold


def tree(c: Constants, n: int, nbytes: float, sharing: int = 1) -> float:
    """Reduction to a root along a binomial tree and broadcast back: 2 log n steps with all bytes."""
    return math.ceil(math.log2(n)) * (2 * message(c, nbytes, sharing) + nbytes * c.fold)


def shared(c: Constants, ranks: int, nbytes: float) -> float:
    """A reduction inside a node: what was measured for two ranks, at the bytes and the peers of `ranks`."""
    return (ranks - 1) * c.memory_floor + 2 * (ranks - 1) / ranks * nbytes * c.memory


def hierarchical(c: Constants, job: Job, nbytes: float, across: Across) -> float:
    """Inside each node, across the nodes, each rank with its share of the bytes on the common link, and back."""
    return shared(c, job.local, nbytes) + across(c, job.nodes, nbytes / job.local, job.local)


def negotiated(c: Constants, job: Job, work: Workload) -> float:
    """Return the seconds of agreeing by a coordinator. In a round it takes and sends one message for each rank of its
    node and one for each other node, whose first rank has taken and sends one for each of the others there.
    """
    if job.ranks == 1:
        return 0.0
    entries = work.tensors / work.rounds
    nbytes = entries * c.entry_bytes
    take = max(c.take + entries * c.take_entry, c.gap)
    tell = max(c.tell + entries * c.tell_entry, c.gap)
    link = nbytes * c.gap_per_byte
    across = (job.nodes - 1) * (max(take, link) + max(tell, link))
    levels = (job.local > 1) + (job.nodes > 1)
    return work.rounds * ((job.local - 1) * (take + tell) + across + 2 * levels * message(c, nbytes))


AGREEMENTS: dict[str, Callable[[Constants, Job, Workload], float]] = {
    # There is no message for a plan that stands.
    "planned": lambda c, job, work: 0.0,
    "negotiated": negotiated,
}

REDUCTIONS: dict[str, Callable[[Constants, Job, float], float]] = {
    # Neighbours on one node are next to each other: one link in and one out of every node.
    "flat ring": lambda c, job, nbytes: ring(c, job.ranks, nbytes),
    # Inside a node, too, by messages.
    "flat tree": lambda c, job, nbytes: tree(c, job.ranks, nbytes),
    "hierarchical": lambda c, job, nbytes: hierarchical(c, job, nbytes, best),
}


def step(c: Constants, job: Job, work: Workload, agreement: str, reduction: str) -> float:
    """Seconds of a step: computation, agreement and reduction after each other."""
    return work.compute + AGREEMENTS[agreement](c, job, work) + REDUCTIONS[reduction](c, job, work.nbytes)


def measure() -> Constants:
    """Measure on ranks 0 and 1. Collective; two ranks. The return value of rank 0 counts."""
    torch.set_num_threads(1)
    hvlike.init()
    messages = RawMpi()
    network = measure_messages(messages)
    memory = measure_memory(messages)
    coordinator = measure_coordinator()
    messages.free()
    hvlike.shutdown()
    return Constants(**network, **memory, **coordinator)


def measure_messages(messages: RawMpi) -> dict[str, float]:
    """L, o, g and G of MPI between the two ranks."""
    one_way = statistics.median(messages.round_trips(8, 1000)) / 2
    bursts = [messages.burst(8, 64) for _ in range(_REPETITIONS)]
    overhead = statistics.median(called for called, _ in bursts)
    spaced = statistics.median(ended for _, ended in bursts)
    small, large = (statistics.median(messages.round_trips(size * _MIB, 15)) / 2 for size in (1, 8))
    return {
        "latency": max(0.0, one_way - 2 * overhead),
        "overhead": overhead,
        "gap": max(overhead, spaced),
        "gap_per_byte": max(0.0, large - small) / (7 * _MIB),
    }


def measure_memory(messages: RawMpi) -> dict[str, float]:
    """Measure a planned reduction inside the node: of nearly nothing, and what every byte adds. Also additions."""
    floor = _planned_seconds(messages, 16)
    small, large = (_planned_seconds(messages, size * _MIB // 4) for size in (4, 32))
    mine, other = np.ones(_MIB, np.float32), np.ones(_MIB, np.float32)
    fold = statistics.median(timed(lambda: np.add(mine, other, out=mine), 3 * _REPETITIONS)) / mine.nbytes
    return {"memory_floor": floor, "memory": max(0.0, large - small) / (28 * _MIB), "fold": fold}


def _planned_seconds(messages: RawMpi, elements: int) -> float:
    """Median seconds of synchronize() of an optimizer with one parameter, ranks beginning together."""
    parameter = torch.nn.Parameter(torch.zeros(elements))
    optimizer = hvlike.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.0))
    seconds = []
    for _ in range(3 + 2 * _REPETITIONS):
        optimizer.zero_grad()
        loss: Any = parameter.sum()
        loss.backward()
        messages.barrier()
        start = time.perf_counter()
        optimizer.synchronize()
        seconds.append(time.perf_counter() - start)
        with optimizer.skip_synchronize():
            optimizer.step()
    return statistics.median(seconds[3:])


def measure_coordinator() -> dict[str, float]:
    """Work of rank 0 as a coordinator: for every message, and for every tensor in it. Collective."""
    few, many = (_measure_agreement(entries) for entries in (_FEW, _MANY))
    take, tell, nbytes = ((b - a) / (_MANY - _FEW) for a, b in zip(few, many, strict=True))
    return {
        "take": max(0.0, few[0] - _FEW * take),
        "take_entry": max(0.0, take),
        "tell": max(0.0, few[1] - _FEW * tell),
        "tell_entry": max(0.0, tell),
        "entry_bytes": nbytes,
    }


def _measure_agreement(entries: int) -> tuple[float, float, float]:
    """Seconds to take and to send a message about so many tensors, and its bytes; rank 1 plays all members."""
    taken, told, size = [], [], 0
    ranks, fabric = tuple(range(_MEMBERS)), current().fabric
    trace = Trace(fabric.recorder, current().find_set(None, "bench simulate").group)
    spec = RequestSpec("allreduce", ("float32",), ((256, 256),), op=1, strides=(None,))
    names = [f"layers.{index}.linear.weight" for index in range(entries)]
    for _ in range(_REPETITIONS):
        responses: list[ResponseList] = []
        inspector = StallInspector(ranks, lambda number: None, StallLimits(None, 0.0))
        coordinator = Coordinator(
            ranks, partial(_keep, responses), fabric.loop, inspector, ResponseCache(4096), 0.0, trace
        )
        # Agreed in full once; from then on members send names and the number.
        for position in ranks:
            coordinator.collect([((position,), [(name, spec) for name in names])])
        agreed = (each for each in responses[-1][0] if isinstance(each, Response))
        number = next(each.number for each in agreed if each.number is not None)
        responses.clear()
        taken.append(_take(coordinator, responses, [(name, number) for name in names]))
        told.append(_tell(responses[-1]))
        size = len(pickle.dumps(responses[-1], protocol=5))
    return statistics.median(taken), statistics.median(told), float(size)


def _keep(responses: list[ResponseList], what: str, announcement: ResponseList) -> None:
    responses.append(announcement)


def _take(coordinator: Coordinator, responses: list[ResponseList], requests: list[tuple[str, int]]) -> float:
    """Return the seconds per message on rank 0, from the first that it opens to the response; 0 on rank 1."""
    moments: list[float] = []

    def collect(position: int) -> None:
        moments.append(time.perf_counter())
        coordinator.collect([((position,), list(requests))])

    fabric = current().fabric
    fabric.channel.listen(Topic.BENCH_READY, lambda rank, body, tensors: collect(body[0]))
    hvlike.barrier()
    if hvlike.rank() == 1:
        for position in range(_MEMBERS):
            fabric.channel.send_soon(0, Topic.BENCH_READY, (position, requests))
            collect(position)
        return 0.0
    fabric.loop.wait(lambda: bool(responses), _LIMIT_SECONDS)
    return (time.perf_counter() - moments[0]) / _MEMBERS


def _tell(response: ResponseList) -> float:
    """Return the seconds that rank 0 needs to send a response to a member; rank 1 receives them all."""
    fabric = current().fabric
    seconds: list[float] = []
    received: list[int] = []
    fabric.channel.listen(Topic.BENCH_TOLD, lambda rank, body, tensors: received.append(rank))

    def tell() -> None:
        start = time.perf_counter()
        for _ in range(_MEMBERS):
            fabric.channel.send(1, Topic.BENCH_TOLD, (0, "responses", response))
        seconds.append((time.perf_counter() - start) / _MEMBERS)

    hvlike.barrier()
    if hvlike.rank() == 0:
        fabric.loop.post(tell, wake=False)
        fabric.loop.wait(lambda: bool(seconds), _LIMIT_SECONDS)
    else:
        fabric.loop.wait(lambda: len(received) == _MEMBERS, _LIMIT_SECONDS)
    hvlike.barrier()
    return seconds[0] if seconds else 0.0
