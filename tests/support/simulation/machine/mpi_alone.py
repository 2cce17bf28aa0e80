"""Jobs of the simulated MPI alone, for its tests: programs that call MPI, and nothing of hvlike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from support.simulation.machine.primitives import thread_class
from support.simulation.machine.scheduler import Scheduler
from support.simulation.machine.simulated_mpi import SimulatedMpi
from support.simulation.machine.simulated_thread import Hang, JobEnded

LARGE = 10_000
"""Bytes of a message that is not buffered."""

ONE_NODE, TWO_NODES = [[0, 1, 2]], [[0, 1], [2]]

Program = Callable[[Any], object]
"""What a rank does, given its module of MPI."""


def run(
    nodes: Sequence[Sequence[int]], *programs: Program, seed: int = 0, prepare: Callable[[SimulatedMpi], object] = bool
) -> SimulatedMpi:
    """Run a job: one program for each rank, or the same for all."""
    ranks = list(range(sum(map(len, nodes))))
    each = programs if len(programs) > 1 else programs * len(ranks)
    return run_threads(nodes, list(zip(ranks, each, strict=True)), seed=seed, prepare=prepare)


def run_threads(
    nodes: Sequence[Sequence[int]],
    programs: Sequence[tuple[int, Program]],
    *,
    seed: int = 0,
    prepare: Callable[[SimulatedMpi], object] = bool,
) -> SimulatedMpi:
    """Run a job: each program in a thread of its rank. Raises: what a program raises; AssertionError if all wait."""
    scheduler = Scheduler(seed, points_per_switch=1.0)
    job = SimulatedMpi(scheduler, nodes)
    prepare(job)
    errors: list[BaseException] = []

    def live(rank: int, program: Program) -> None:
        try:
            program(job.module(rank))
        except JobEnded:
            raise
        except BaseException as error:
            errors.append(error)
            # The others would wait for it.
            for other in {rank for rank, _ in programs} - {rank}:
                scheduler.lose(other)

    for rank, program in programs:
        thread: Any = thread_class(scheduler, {})(target=partial(live, rank, program), name="main")
        thread.given_rank = rank
        thread.start()
    try:
        scheduler.run()
    except Hang as hang:
        errors.append(AssertionError(f"all wait: {hang}"))
    if errors:
        raise errors[0]
    return job


def poll(*requests: Any) -> None:
    for request in requests:
        while not request.Test():
            pass


def numbers(count: int, start: int = 0) -> np.ndarray[Any, Any]:
    return (np.arange(count) + start).astype(np.uint8)
