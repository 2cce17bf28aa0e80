"""Several ranks of one node in one process: their regions lie in one piece of ordinary memory."""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from hvlike.backends.shared_memory.region import Region, region_bytes
from hvlike.system.mapped_memory import Segment
from hvlike.transport.loop.spin import SpinPolicy
from hvlike.transport.memory.doorbell import Doorbell, Fence


def regions(ranks: int, chunk: int = 64 << 10) -> list[Region]:
    """The region of a node as each of its ranks sees it. Nobody sleeps."""
    segment = Segment.private(region_bytes(ranks, chunk))
    nobody = SimpleNamespace(asleep=[0], notify_if_sleeping=lambda: None)
    bells = [cast("Doorbell", nobody) for _ in range(ranks)]
    return [Region(segment, rank, ranks, chunk, bells, Fence(), spin=SpinPolicy(crowded=True)) for rank in range(ranks)]


def play(draw: random.Random, coroutines: list[Any]) -> list[Any]:
    """Advance coroutines in a random order until all have ended; returns their results, in their own order."""
    results: dict[int, Any] = {}
    running = dict(enumerate(coroutines))
    while running:
        number = draw.choice(list(running))
        try:
            next(running[number])
        except StopIteration as stop:
            results[number] = stop.value
            del running[number]
    return [results[number] for number in range(len(coroutines))]


def addresses_of(arrays: list[Any]) -> list[int]:
    """Where arrays begin."""
    return [array.ctypes.data for array in arrays]


def odd(array: Any) -> Any:
    """The same values, where no element of its kind begins otherwise."""
    room = np.zeros(array.nbytes + 1, np.uint8)[1:]
    room[:] = array.view(np.uint8)
    return room.view(array.dtype)


def on_all(everybody: list[Region], make: Callable[[Region], Any]) -> list[Any]:
    """What `make` returns for each rank."""
    return [make(region) for region in everybody]
