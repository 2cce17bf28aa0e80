"""What bench simulate runs on two ranks of this machine: measures the constants of its model and prints them."""

from __future__ import annotations

import json
import pickle
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

import hvlike
from hvlike.bench.loggp import Constants
from hvlike.collectives.context import current
from hvlike.collectives.coordinator import Announcement, Coordinator
from hvlike.collectives.inspection import Inspection, StallLimits
from hvlike.collectives.request import Signature
from hvlike.collectives.trace import Trace
from hvlike.transport.raw_messages import RawMessages

_MIB = 1 << 20
_READY_TOPIC, _TOLD_TOPIC = 990, 991
_MEMBERS = 100
"""Ranks that the coordinator is made to believe in."""
_FEW, _MANY = 1, 101
_REPETITIONS = 7
_PATIENCE_SECONDS = 30.0


def main() -> int:
    """Measure on ranks 0 and 1, print one JSON object on rank 0. Collective; two ranks. Returns the exit status."""
    torch.set_num_threads(1)
    hvlike.init()
    messages = RawMessages()
    network = measure_messages(messages)
    memory = measure_memory(messages)
    coordinator = measure_coordinator()
    messages.free()
    if hvlike.rank() == 0:
        constants = Constants(**network, **memory, **coordinator, fold=fold())
        print(json.dumps(asdict(constants)))
    hvlike.shutdown()
    return 0


def measure_messages(messages: RawMessages) -> dict[str, float]:
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


def measure_memory(messages: RawMessages) -> dict[str, float]:
    """A planned reduction inside the node: of hardly anything, and what every byte adds."""
    floor = _planned_seconds(messages, 16)
    small, large = (_planned_seconds(messages, size * _MIB // 4) for size in (4, 32))
    return {"memory_floor": floor, "memory": max(0.0, large - small) / (28 * _MIB)}


def _planned_seconds(messages: RawMessages, elements: int) -> float:
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


def fold() -> float:
    """Seconds a byte for adding float32 numbers that have come to those that are there."""
    mine, other = np.ones(_MIB, np.float32), np.ones(_MIB, np.float32)
    seconds = []
    for _ in range(3 * _REPETITIONS):
        start = time.perf_counter()
        np.add(mine, other, out=mine)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) / mine.nbytes


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
    for _ in range(_REPETITIONS):
        announced: list[Announcement] = []
        coordinator = _coordinator(announced.append)
        asked = _numbered(coordinator, announced, entries)
        taken.append(_take(coordinator, announced, asked))
        told.append(_tell(announced[-1]))
        size = len(pickle.dumps(announced[-1], protocol=5))
    return statistics.median(taken), statistics.median(told), float(size)


def _coordinator(announce: Callable[[Announcement], None]) -> Coordinator:
    ranks = tuple(range(_MEMBERS))
    membership = current().membership(None, "bench simulate")
    inspection = Inspection(ranks, lambda number: None, StallLimits(None, 0.0))
    return Coordinator(ranks, announce, inspection, 4096, Trace(current().fabric.recorder, membership.group))


def _numbered(coordinator: Coordinator, announced: list[Announcement], entries: int) -> list[tuple[str, int]]:
    """Agree once in full; what the members send from then on: names and numbers."""
    signature = Signature("allreduce", ("float32",), ((256, 256),), op=1, strides=(None,))
    names = [f"layers.{index}.linear.weight" for index in range(entries)]
    for position in range(_MEMBERS):
        coordinator.collect(position, [(name, signature) for name in names])
    number = next(number for _, number in announced[-1][0] if number is not None)
    announced.clear()
    return [(name, number) for name in names]


def _take(coordinator: Coordinator, announced: list[Announcement], asked: list[tuple[str, int]]) -> float:
    """Seconds a message from the first that rank 0 opens to its announcement; nothing of use on rank 1."""
    moments: list[float] = []

    def hear(position: int) -> None:
        moments.append(time.perf_counter())
        coordinator.collect(position, list(asked))

    fabric = current().fabric
    fabric.channel.listen(_READY_TOPIC, lambda rank, letter, tensors: hear(letter[0]))
    hvlike.barrier()
    if hvlike.rank() == 1:
        for position in range(_MEMBERS):
            fabric.channel.send_soon(0, _READY_TOPIC, (position, asked))
            hear(position)
        return 0.0
    fabric.loop.wait(lambda: bool(announced), _PATIENCE_SECONDS)
    return (time.perf_counter() - moments[0]) / _MEMBERS


def _tell(announcement: Announcement) -> float:
    """Seconds rank 0 needs to send a message to a member; rank 1 receives them all."""
    fabric = current().fabric
    seconds: list[float] = []
    received: list[int] = []
    fabric.channel.listen(_TOLD_TOPIC, lambda rank, letter, tensors: received.append(rank))

    def tell() -> None:
        start = time.perf_counter()
        for _ in range(_MEMBERS):
            fabric.channel.send(1, _TOLD_TOPIC, (0, "verdicts", announcement))
        seconds.append((time.perf_counter() - start) / _MEMBERS)

    hvlike.barrier()
    if hvlike.rank() == 0:
        fabric.loop.post(tell, wake=False)
        fabric.loop.wait(lambda: bool(seconds), _PATIENCE_SECONDS)
    else:
        fabric.loop.wait(lambda: len(received) == _MEMBERS, _PATIENCE_SECONDS)
    hvlike.barrier()
    return seconds[0] if seconds else 0.0


if __name__ == "__main__":
    sys.exit(main())
