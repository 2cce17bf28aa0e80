"""Runs a whole job in this process: each rank is a thread of its own, and what it reaches of the system is simulated.

    outcomes = simulate(program, nodes=[[0, 1, 2]], seed=7)      # program(hvd, rank), on each rank

Run it with PYTHONHASHSEED=0: the order of sets of strings must be the same every time.
"""

from __future__ import annotations

import contextlib
import gc
import io
import math
import os
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

from support.simulation.machine.memory import NodeMemory
from support.simulation.machine.primitives import (
    SimulatedCondition,
    SimulatedEvent,
    SimulatedLock,
    SimulatedRLock,
    thread_class,
)
from support.simulation.machine.processes import Processes
from support.simulation.machine.scheduler import MOST_POINTS, TICK_SECONDS, Scheduler
from support.simulation.machine.simulated_mpi import SimulatedMpi
from support.simulation.machine.simulated_network import Message
from support.simulation.machine.simulated_thread import Hang
from support.simulation.machine.sockets import Sockets
from support.simulation.machine.statements import Statements
from support.simulation.machine.store_buffers import Order
from support.simulation.machine.torch_of_ranks import torch_of_ranks

from hvlike.backends.network import cost_model
from hvlike.system.system import states_of_process, system
from hvlike.transport.failure import fault_tolerance
from hvlike.transport.failure.guard import ON_DUTY
from hvlike.transport.memory import process_memory
from hvlike.transport.messages.channel import FLAG_BITS, HEADER
from hvlike.transport.messages.traffic import Topic

Program = Callable[[Any, int], Any]
"""(hvlike, rank): what it returns is the rank's result."""

LAUNCHER = -1
"""The rank of a thread that belongs to none."""


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
    nodes: int = 1
    held: float = 0.0  # For how many seconds ranks were held up
    judge: Callable[[JobEnd], str | None] | None = None  # The program's own: why the job has not ended as it should
    hang: str | None = None
    seconds: float = 0.0  # Virtual
    points: int = 0
    longest_rest: float = 0.0  # Virtual seconds
    violations: list[str] = field(default_factory=list)  # What MPI forbids, and was done
    died: list[str] = field(default_factory=list)  # Threads that an error has ended
    story: list[str] = field(default_factory=list)
    gone: dict[int, float] = field(default_factory=dict)  # When the process of each rank has ended
    killed: set[int] = field(default_factory=set)
    aborted: tuple[int, int] | None = None  # Who has ended the job, and its status


class ProcessStates:
    """What belongs to the process of a rank: put in its place whenever the rank has the turn."""

    def __init__(self, ranks: int) -> None:
        """Once hvlike reaches the simulation: what is made here may have locks."""
        self._states = [state for state, _ in states_of_process()]
        self._before = [vars(each) for each in self._states]
        self._of_rank = [[vars(make()) for _, make in states_of_process()] for _ in range(ranks)]

    def change(self, rank: int) -> None:
        """The turn goes to a rank."""
        if rank == LAUNCHER:
            return
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


@dataclass(frozen=True)
class Kill:
    """A process is killed after so many points."""

    points: int
    rank: int


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _installed(
    scheduler: Scheduler, nodes: Sequence[Sequence[int]], *, shares_cores: bool, stores: Order
) -> Iterator[tuple[SimulatedMpi, Processes]]:
    """Let hvlike reach the simulation in the place of the system."""
    outlives = fault_tolerance.is_enabled(os.environ)
    mpi = SimulatedMpi(scheduler, nodes, outlives=outlives)
    node_of = {rank: number for number, ranks in enumerate(nodes) for rank in ranks}
    memory = NodeMemory(scheduler, node_of, stores)
    core = {rank: frozenset([0 if shares_cores else rank]) for rank in node_of}
    sockets = Sockets(scheduler, mpi)
    processes = Processes(scheduler, mpi, node_of, outlives=outlives)
    mpi.on_abort = processes.abort
    before, functions = dict(vars(system)), dict(process_memory.FUNCTIONS)
    measurement = cost_model.ROUNDS, cost_model.FOLDED_BYTES
    threads: dict[int, list[threading.Thread]] = {}
    replaced: dict[str, Any] = {
        "monotonic": scheduler.clock,
        "monotonic_ns": lambda: int(scheduler.clock() * 1e9),
        "perf_counter": scheduler.clock,
        "time_ns": lambda: int(scheduler.clock() * 1e9),
        "sleep": scheduler.sleep,
        "Thread": thread_class(scheduler, threads),
        "lasting_threads": lambda: [each for each in threads.get(scheduler.rank, ()) if each.is_alive()],
        "Lock": lambda: SimulatedLock(scheduler),
        "RLock": lambda: SimulatedRLock(scheduler),
        "Condition": lambda: SimulatedCondition(scheduler),
        "Event": lambda: SimulatedEvent(scheduler),
        "cores": lambda: core[scheduler.rank],
        "yield_core": scheduler.give_way,
        "orders_stores": stores != "reordered",
        "semaphore": memory.semaphore,
        "words": memory.words,
        "private": memory.private,
        "make_offer": memory.make_offer,
        "accept": memory.accept,
        "socket_events": sockets.open,
        "mpi": lambda: mpi.module(scheduler.rank),
        "process": processes.process,
        "kill": processes.kill,
        "process_status": processes.status,
        "at_exit": processes.at_exit,
        "not_at_exit": processes.not_at_exit,
        "exit_now": processes.exit_now,
        "first_report": processes.first_report,
        "start_thread": lambda run, arguments: run(*arguments),
    }
    vars(system).update(replaced)
    process_memory.FUNCTIONS.update({name: processes.access(each) for name, each in functions.items()})
    # A network whose times are drawn needs no better figures.
    cost_model.ROUNDS, cost_model.FOLDED_BYTES = 4, 64
    try:
        with contextlib.redirect_stderr(io.StringIO()), torch_of_ranks(scheduler):
            yield mpi, processes
    finally:
        vars(system).update(before)
        process_memory.FUNCTIONS.update(functions)
        cost_model.ROUNDS, cost_model.FOLDED_BYTES = measurement


def simulate(
    program: Program,
    nodes: Sequence[Sequence[int]],
    seed: int,
    *,
    trace: bool = False,
    points_per_switch: float = 20.0,
    most_seconds: float = math.inf,
    most_points: int = MOST_POINTS,
    tick_seconds: float = TICK_SECONDS,
    holds: Sequence[tuple[int, int, float]] = (),
    acts: Sequence[tuple[int, int, float]] = (),
    shares_cores: bool = False,
    stores: Order = "at once",
    statements: float = 0.0,
    late_wakes: float = 0.0,
    prepare: Callable[[SimulatedMpi], object] = bool,
    kills: Sequence[Kill] = (),
    launcher_seconds: float = 0.1,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> JobEnd:
    """Run the program on every rank until all have ended, or nobody can go on.

    most_seconds, most_points: after which a job counts as one that never ends: ranks that wait look around a few times
    a second for ever. tick_seconds: what a point takes, of virtual time. holds: after so many points that rank goes on
    no more, for so many seconds. acts: the same after it has done so many things that others can see. shares_cores: all
    ranks have one core. stores: when others see what a rank writes to shared memory. statements: after so many points,
    on average, a thread loses its core between two of hvlike's; 0: never. late_wakes: the part of those who wake that
    get a core later. prepare: may set attributes of the network.
    launcher_seconds: how long after a loss the launcher kills the other ranks, unless the job outlives it. environment:
    variables that all ranks have.
    """
    import hvlike

    # All of it: what belongs to a rank is known then.
    dir(hvlike.init)
    size = sum(map(len, nodes))
    end = JobEnd(
        [Outcome() for _ in range(size)],
        len(nodes),
        sum(seconds for *_, seconds in (*holds, *acts)),
        getattr(program, "judge", None),
    )
    note = end.story.append if trace else None
    scheduler = Scheduler(
        seed,
        points_per_switch=points_per_switch,
        trace=note,
        most_seconds=most_seconds,
        most_points=most_points,
        tick_seconds=tick_seconds,
    )
    scheduler.holds, scheduler.late_wakes = sorted(holds), late_wakes
    scheduler.acts = {(rank, count): seconds for count, rank, seconds in acts}
    between = None
    collects, hook = gc.isenabled(), threading.excepthook
    gc.disable()
    threading.excepthook = lambda about: end.died.append(
        "".join(traceback.format_exception(about.exc_type, about.exc_value, about.exc_traceback))
    )
    try:
        with (
            _environment(environment),
            _installed(scheduler, nodes, shares_cores=shares_cores, stores=stores) as (mpi, processes),
            _states(size) as states,
        ):
            prepare(mpi)
            scheduler.on_rank = states.change
            if trace:
                mpi.trace, mpi.explain = scheduler.say, _topic_of

            def start(rank: int, name: str, run: Callable[[], None]) -> None:
                thread: Any = system.Thread(target=run, name=name)
                thread.given_rank = rank
                thread.start()

            processes.launcher_seconds = launcher_seconds
            processes.start_thread = partial(start, LAUNCHER, "launcher")
            scheduler.events = [(each.points, partial(processes.lose, each.rank)) for each in kills]
            scheduler.events.sort(key=lambda event: event[0])
            between = Statements(scheduler, statements) if statements else None
            for rank in range(size):
                outcome = end.ranks[rank]
                main = _main(hvlike, program, rank, outcome, scheduler)
                run = partial(processes.run, rank, main, lambda: ON_DUTY.guard)
                start(rank, "main", run)
            try:
                scheduler.run()
            except Hang as hang:
                end.hang = str(hang)
            # Threads that unwind after a hang do what they like.
            end.violations = [] if end.hang is not None else list(mpi.violations)
            end.gone, end.killed, end.aborted = processes.gone, processes.killed, processes.aborted
    finally:
        threading.excepthook = hook
        if collects:
            gc.enable()
    end.held += scheduler.away_seconds + (0.0 if between is None else between.seconds)
    end.seconds, end.points, end.longest_rest = scheduler.now, scheduler.points, scheduler.longest_rest
    return end


def _topic_of(message: Message) -> str:
    """What a message of hvlike's channel is about; payloads have other tags."""
    if not message.context.name.startswith("hvlike") or message.tag != 1:
        return ""
    code, _, _ = HEADER.unpack_from(message.memory.data)
    return f": {Topic(code >> FLAG_BITS).name}"


def _main(hvd: Any, program: Program, rank: int, outcome: Outcome, scheduler: Scheduler) -> Callable[[], None]:
    def run() -> None:
        try:
            outcome.result = program(hvd, rank)
        except (Exception, SystemExit) as error:
            if scheduler.current is not None and scheduler.current.is_over:
                # A rank that is killed has ended before: what it raises as it unwinds nobody sees.
                return
            outcome.error, outcome.trace = error, traceback.format_exc()
            outcome.ended = True
            scheduler.say(f"the program ends with {type(error).__name__}: {error}")
            raise
        outcome.ended = True
        scheduler.say("the program ends")

    return run
