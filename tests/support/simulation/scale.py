"""What each rank of a large job sends and gets to control it: whole simulated jobs of up to a thousand ranks.

Tensors have a few elements. Counted are the messages of hvlike's channel, by the phase in which they were sent; what
moves tensors is not counted. Every rank has a core of its own: a point takes as many times less virtual time as there
are ranks.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from support.simulation.machine.job import simulate
from support.simulation.machine.simulated_mpi import SimulatedMpi
from support.simulation.machine.simulated_network import Message
from support.simulation.programs.parts import loss_of, make_model

PHASES = ("init", "named operation", "process set", "first steps", "steady steps", "join", "shutdown")


@dataclasses.dataclass
class Traffic:
    """Messages of one phase."""

    sent: Counter[int] = dataclasses.field(default_factory=Counter)  # By rank
    got: Counter[int] = dataclasses.field(default_factory=Counter)
    seconds: float = 0.0  # Virtual, on rank 0

    @property
    def most_sent(self) -> int:
        """By one rank."""
        return max(self.sent.values(), default=0)

    @property
    def total(self) -> int:
        """By all ranks."""
        return self.sent.total()


@dataclasses.dataclass
class Counts:
    """Counts what a job sends, by the phase that the sender is in."""

    phases: dict[str, Traffic] = dataclasses.field(default_factory=lambda: {each: Traffic() for each in PHASES})
    of_rank: dict[int, str] = dataclasses.field(default_factory=dict)

    def see(self, message: Message) -> str:
        """Called with each message."""
        if message.context.name.startswith("hvlike") and message.tag == 1:
            traffic = self.phases[self.of_rank.get(message.sender, "init")]
            traffic.sent[message.sender] += 1
            traffic.got[message.receiver] += 1
        return ""

    def prepare(self, mpi: SimulatedMpi) -> None:
        """Have all messages seen."""
        mpi.trace, mpi.explain = (lambda event: None), self.see
        mpi.sockets_tell = True


def measure(hosts: int, ranks: int, seed: int = 0) -> Counts:
    """Run a job of so many ranks on each of so many hosts. Raises: RuntimeError if it does not end well."""
    counts, size = Counts(), hosts * ranks
    nodes = [list(range(host * ranks, (host + 1) * ranks)) for host in range(hosts)]

    def program(hvd: Any, rank: int) -> None:
        from hvlike.join import Join
        from hvlike.system.system import system

        def phase(name: str, act: Callable[[], object]) -> None:
            counts.of_rank[rank] = name
            began = system.monotonic()
            act()
            if rank == 0:
                counts.phases[name].seconds = system.monotonic() - began

        phase("init", hvd.init)
        phase("named operation", lambda: hvd.allreduce(torch.ones(1), name="one"))
        phase("process set", lambda: hvd.add_process_set(range(0, size, 2)))
        model = make_model()
        sgd = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())

        def steps() -> None:
            for _ in range(2):
                optimizer.zero_grad()
                loss_of(model, 0, rank).backward()  # type: ignore[no-untyped-call]
                optimizer.step()

        def join() -> None:
            with Join([optimizer]):
                if rank:
                    steps()

        phase("first steps", steps)
        # As long as the last one is under way, nobody is in the steady ones.
        phase("named operation", hvd.barrier)
        phase("steady steps", steps)
        phase("join", join)
        phase("shutdown", hvd.shutdown)

    seconds = {"tick_seconds": 4e-6 / size, "most_points": sys.maxsize}
    end = simulate(program, nodes, seed, points_per_switch=1e6, shares_cores=True, prepare=counts.prepare, **seconds)
    failed = next((each.trace for each in end.ranks if each.error is not None), end.hang)
    if failed:
        raise RuntimeError(failed)
    return counts


def show(hosts: int, ranks: int) -> str:
    """A table of what was counted."""
    counts = measure(hosts, ranks)
    lines = [f"{hosts} hosts with {ranks} ranks each: control messages"]
    lines += [f"{'':16} {'rank 0 gets':>12} {'most by one':>12} {'in all':>8} {'ms':>8}"]
    for name, each in counts.phases.items():
        lines += [f"{name:16} {each.got[0]:12} {each.most_sent:12} {each.total:8} {1e3 * each.seconds:8.2f}"]
    return "\n".join(lines)
