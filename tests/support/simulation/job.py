"""Runs a whole job in this process: each rank is a thread of its own, and what it reaches of the system is simulated.

    outcomes = simulate(program, nodes=[[0, 1, 2]], seed=7)      # program(hvd, rank), on each rank

Run it with PYTHONHASHSEED=0: the order of sets of strings must be the same every time.
"""

from __future__ import annotations

import gc
import math
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from support.simulation.memory import NodeMemory
from support.simulation.primitives import (
    SimulatedCondition,
    SimulatedEvent,
    SimulatedLock,
    SimulatedRLock,
    thread_class,
)
from support.simulation.scheduler import Hang, Scheduler
from support.simulation.simulated_mpi import SimulatedMpi
from support.simulation.torch_of_ranks import torch_of_ranks

from hvlike.system.system import states_of_process, system

Program = Callable[[Any, int], Any]
"""(hvlike, rank): what it returns is the rank's result."""


@dataclass
class Outcome:
    """How the program of a rank has ended."""

    result: Any = None
    error: BaseException | None = None
    trace: str = ""
    ended: bool = False


@dataclass
class JobEnd:
    """How a job has ended."""

    ranks: list[Outcome]
    hang: str | None = None
    seconds: float = 0.0  # Virtual
    points: int = 0
    longest_rest: float = 0.0  # Virtual seconds
    violations: list[str] = field(default_factory=list)  # What MPI forbids, and was done
    died: list[str] = field(default_factory=list)  # Threads that an error has ended
    story: list[str] = field(default_factory=list)


class ProcessStates:
    """What belongs to the process of a rank: put in its place whenever the rank has the turn."""

    def __init__(self, ranks: int) -> None:
        """Once hvlike reaches the simulation: what is made here may have locks."""
        self._states = [state for state, _ in states_of_process()]
        self._before = [vars(each) for each in self._states]
        self._of_rank = [[vars(make()) for _, make in states_of_process()] for _ in range(ranks)]

    def change(self, rank: int) -> None:
        """The turn goes to a rank."""
        for state, attributes in zip(self._states, self._of_rank[rank], strict=True):
            state.__dict__ = attributes

    def restore(self) -> None:
        """Put back what was there before the job."""
        for state, attributes in zip(self._states, self._before, strict=True):
            state.__dict__ = attributes


@contextmanager
def _states(ranks: int) -> Iterator[ProcessStates]:
    states = ProcessStates(ranks)
    try:
        yield states
    finally:
        states.restore()


class NoSockets:
    """hvlike.transport.loop.socket_events.SocketEvents, where MPI's messages come another way: ranks poll."""

    carry = paced = False
    token = 0

    def scan(self) -> None:
        """Nothing is there."""

    check_carry = close = scan

    def send(self, token: int) -> None:
        """Nobody sleeps on it."""


@contextmanager
def _installed(scheduler: Scheduler, nodes: Sequence[Sequence[int]]) -> Iterator[SimulatedMpi]:
    """Let hvlike reach the simulation in the place of the system."""
    mpi = SimulatedMpi(scheduler, nodes)
    node_of = {rank: number for number, ranks in enumerate(nodes) for rank in ranks}
    memory = NodeMemory(scheduler, node_of)
    core = {rank: frozenset([rank]) for rank in node_of}
    before = dict(vars(system))
    replaced: dict[str, Any] = {
        "monotonic": scheduler.clock,
        "monotonic_ns": lambda: int(scheduler.clock() * 1e9),
        "perf_counter": scheduler.clock,
        "time_ns": lambda: int(scheduler.clock() * 1e9),
        "sleep": scheduler.sleep,
        "Thread": thread_class(scheduler),
        "Lock": lambda: SimulatedLock(scheduler),
        "RLock": lambda: SimulatedRLock(scheduler),
        "Condition": lambda: SimulatedCondition(scheduler),
        "Event": lambda: SimulatedEvent(scheduler),
        "cores": lambda: core[scheduler.rank],
        "yield_core": lambda: scheduler.switch("yield"),
        "orders_stores": True,
        "semaphore": memory.semaphore,
        "words": memory.words,
        "private": memory.private,
        "make_offer": memory.make_offer,
        "accept": memory.accept,
        "socket_events": NoSockets,
        "mpi": lambda: mpi.module(scheduler.rank),
    }
    vars(system).update(replaced)
    try:
        with torch_of_ranks(scheduler):
            yield mpi
    finally:
        vars(system).update(before)


def simulate(
    program: Program,
    nodes: Sequence[Sequence[int]],
    seed: int,
    *,
    trace: bool = False,
    points_per_switch: float = 20.0,
    most_seconds: float = math.inf,
    holds: Sequence[tuple[int, int, float]] = (),
) -> JobEnd:
    """Run the program on every rank until all have ended, or nobody can go on.

    most_seconds: of virtual time, after which a job counts as one that never ends. Ranks that wait look around a few
    times a second for ever. holds: after so many points that rank goes on no more, for so many seconds.
    """
    import hvlike

    # All of it: what belongs to a rank is known then.
    dir(hvlike.init)
    size = sum(map(len, nodes))
    end = JobEnd([Outcome() for _ in range(size)])
    note = end.story.append if trace else None
    scheduler = Scheduler(seed, points_per_switch=points_per_switch, trace=note, most_seconds=most_seconds)
    scheduler.holds = sorted(holds)
    collects, hook = gc.isenabled(), threading.excepthook
    gc.disable()
    threading.excepthook = lambda about: end.died.append(
        "".join(traceback.format_exception(about.exc_type, about.exc_value, about.exc_traceback))
    )
    try:
        with _installed(scheduler, nodes) as mpi, _states(size) as states:
            scheduler.on_rank = states.change
            if trace:
                mpi.trace = scheduler.say
            for rank in range(size):
                main: Any = system.Thread(
                    target=_main(hvlike, program, rank, end.ranks[rank]), name="main", daemon=True
                )
                main.given_rank = rank
                main.start()
            try:
                scheduler.run()
            except Hang as hang:
                end.hang = str(hang)
            # Threads that unwind after a hang do what they like.
            end.violations = [] if end.hang is not None else list(mpi.violations)
    finally:
        threading.excepthook = hook
        if collects:
            gc.enable()
    end.seconds, end.points, end.longest_rest = scheduler.now, scheduler.points, scheduler.longest_rest
    return end


def _main(hvd: Any, program: Program, rank: int, outcome: Outcome) -> Callable[[], None]:
    def run() -> None:
        try:
            outcome.result = program(hvd, rank)
        except Exception as error:
            outcome.error, outcome.trace = error, traceback.format_exc()
        outcome.ended = True

    return run
