"""Elastic training that loses ranks under fault tolerance: the others go on, as docs/elastic.md promises.

Every step is written down in the state with the number of ranks that have made it. So one process can repeat what was
trained, whoever was lost in between, and must come to the same parameters.

    killed     one or two processes, at any points, spares too
    raises     one rank, in a step: only that rank ends
    error      one rank meets an internal error in a step: all go back to the last commit
    late       one or two processes, some points after they have trained: the others may be on their way out
    cut        a node is cut off: the side of the majority goes on, of two halves that with rank 0; the others end

All that are left have to end well, with the same result, soon after the last loss. The job may end instead where a rank
was lost before all were through init().
"""

from __future__ import annotations

import contextlib
import io
import math
import random
import shutil
import signal
import weakref
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from support.simulation.machine.job import JobEnd, Kill
from support.simulation.machine.simulated_ulfm import TCP_SECONDS
from support.simulation.programs.parts import loss_of, make_model
from torch import Tensor, nn

from hvlike.training.elastic.checkpoint_files import list_files, read

WAYS = ("killed", "killed", "killed", "late", "raises", "error", "cut")
ACTS = ("raises", "error", "cut")  # What a rank does in a step
LATE_POINTS = 400
HEARTBEAT_SECONDS = 8.0  # Where a link is cut; longer than ranks are held up at a time
RECOVERY_SECONDS = 6.0
"""From the last loss to the end of the training. MPI may hear of a loss after 1.5 s, and the steps take some time."""


class Failure(Exception):
    """What the training function of a rank raises."""


def repeat(history: list[tuple[int, int]]) -> list[Tensor]:
    """Train as a job does that has made these steps, each with so many ranks."""
    model = make_model()
    optimizer = make_optimizer(model)
    for step, size in history:
        optimizer.zero_grad()
        for rank in range(size):
            (loss_of(model, step, rank) / size).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return [each.detach() for each in model.parameters()]


def _kill(kill: Callable[[int, int], object], process: int) -> None:
    """Unless it has ended."""
    with contextlib.suppress(ProcessLookupError):
        kill(process, signal.SIGKILL)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """One with a state of its own."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


@dataclass
class Elastic:
    """Steps with commits, and what goes wrong."""

    steps: int
    commit_every: int
    way: str
    culprits: list[int]
    points: list[int]  # When they are killed
    at: int  # In which step it happens otherwise
    spares: int
    durable: bool = False  # Whether commits are written to the disk
    folder: Path | None = field(default=None, compare=False, repr=False)
    began: dict[int, float] = field(default_factory=dict, compare=False, repr=False)  # When each rank was through init
    done: dict[int, float] = field(default_factory=dict, compare=False, repr=False)  # When it was through training
    acted: list[float] = field(default_factory=list, compare=False, repr=False)  # When a culprit has failed
    apart: list[int] = field(default_factory=list, compare=False, repr=False)  # The ranks of a node that was cut off

    @classmethod
    def draw(cls, seed: int, size: int) -> Elastic:
        """Draw one."""
        draw = random.Random(seed)
        steps = draw.randint(2, 9)
        culprits = draw.sample(range(size), min(size - 1, draw.choice([1, 1, 2])))
        first = 800 + int(draw.expovariate(1 / 4_000))
        gap = draw.choice([0, 30, 400, 3_000])
        points = [first + int(number * draw.expovariate(1.0) * gap) for number in range(len(culprits))]
        way = draw.choice(WAYS)
        spares = draw.choice([0, 0, 1]) if size > 2 and way != "cut" else 0
        # The last step, too: what follows it is the end of the job.
        at, every = draw.choice([draw.randrange(steps), steps - 1]), draw.randint(1, 3)
        return cls(steps, every, way, culprits, points, at, spares, draw.random() < 0.3)

    def options(self) -> dict[str, Any]:
        """What `simulate` is to be given."""
        environment = {"OMPI_MCA_mpi_ft_enable": "1", "HVLIKE_SPARES": str(self.spares)}
        if self.way == "cut":
            environment["HVLIKE_HEARTBEAT_SECONDS"] = str(HEARTBEAT_SECONDS)
        if self.durable:
            self.folder = Path(mkdtemp())
            # Also where nobody judges the job.
            weakref.finalize(self, shutil.rmtree, self.folder)
            environment |= {"HVLIKE_CHECKPOINT_DIR": str(self.folder), "HVLIKE_CHECKPOINT_SECONDS": "0"}
        kills = [Kill(*each) for each in zip(self.points, self.culprits, strict=True)] if self.way == "killed" else []
        return {"kills": kills, "environment": environment}

    def __call__(self, hvd: Any, rank: int) -> list[tuple[int, int]]:
        from hvlike.system.system import system

        hvd.init()
        self.began[rank] = system.monotonic()
        model = make_model()
        optimizer = hvd.DistributedOptimizer(make_optimizer(model), model.named_parameters())

        def train(state: Any) -> None:
            while state.step < self.steps:
                if state.step == self.at and rank == self.culprits[0] and self.way in ACTS and not self.acted:
                    self.acted.append(system.monotonic())
                    if self.way == "cut":
                        self._cut(system.mpi().job, rank)
                        continue
                    raise Failure if self.way == "raises" else hvd.HorovodInternalError("made up")
                optimizer.zero_grad()
                loss_of(model, state.step, hvd.rank()).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                state.history = [*state.history, (state.step, hvd.size())]
                state.step += 1
                if state.step % self.commit_every == 0:
                    state.commit()

        state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0, history=[])
        hvd.elastic.run(train)(state)
        self.done[rank] = system.monotonic()
        self._check(rank, state.history, [each.detach() for each in model.parameters()])
        if self.way == "late" and rank in self.culprits:
            kill = partial(_kill, system.kill, system.process())
            self._plan(system.mpi().job.scheduler, self.points[self.culprits.index(rank)] % LATE_POINTS, kill)
        hvd.shutdown()
        history: list[tuple[int, int]] = state.history
        return history

    def _check(self, rank: int, history: list[tuple[int, int]], parameters: list[Tensor]) -> None:
        steps = [step for step, _ in history]
        assert steps == list(range(self.steps)), f"rank {rank} has made the steps {steps}"
        for found, wanted in zip(parameters, repeat(history), strict=True):
            assert torch.allclose(found, wanted, atol=1e-6), f"rank {rank}: {found}, expected {wanted} after {history}"

    def _cut(self, network: Any, rank: int) -> None:
        """Cut the link of this rank's node some points from now."""
        node = network.node_of[rank]
        if len(set(network.node_of.values())) > 1:
            self._plan(network.scheduler, self.points[0] % 1000, partial(network.cut_off, node))
            self.apart += [each for each, place in network.node_of.items() if place == node]

    def _plan(self, scheduler: Any, points: int, act: Callable[[], object]) -> None:
        """Have something happen so many points from now."""
        insort(scheduler.events, (scheduler.points + points, act), key=lambda each: each[0])

    def judge(self, end: JobEnd) -> str | None:
        """Why the job has not ended as it should; None if it has."""
        wrong = self._judge_end(end)
        if self.folder is not None:
            has_ended = any(each.error is None and each.ended for each in end.ranks)
            wrong = wrong or self._judge_files(self.folder, has_ended)
        return wrong

    def _judge_files(self, folder: Path, has_ended: bool) -> str | None:
        """Whether all checkpoints are whole, and of what was trained; the newest one of the end of the training."""
        reached = 0
        for file in list_files(folder):
            state = torch.load(io.BytesIO(read(file)), weights_only=True)
            history, step = state["history"], state["step"]
            reached = max(reached, step)
            if [each for each, _ in history] != list(range(step)):
                return f"{file.path.name} is of step {step}, with the history {history}"
            for found, wanted in zip(state["model"].values(), repeat(history), strict=True):
                if not torch.allclose(found, wanted, atol=1e-6):
                    return f"{file.path.name} has {found}, expected {wanted} after {history}"
        last = self.steps - self.steps % self.commit_every
        return f"the newest checkpoint is of step {reached}, not {last}" if has_ended and reached < last else None

    def _judge_end(self, end: JobEnd) -> str | None:
        if end.hang is not None:
            return f"it hangs: {end.hang}"
        size = len(end.ranks)
        last = max((end.gone[rank] for rank in end.killed), default=max(self.acted, default=math.inf))
        first = min((end.gone[rank] for rank in end.killed), default=math.inf)
        if len(self.began) < size or max(self.began.values()) > first:
            # Lost in init(): the others may end, too.
            errors = [each for each in end.ranks if each.error is not None]
            known = ("PeerLeftError", "RestartError", "SystemExit", "Failure")
            return next((each.trace for each in errors if type(each.error).__name__ not in known), None)
        if self.apart and end.held < HEARTBEAT_SECONDS:
            # Who stands still for longer counts as lost, too.
            weight = 2 * len(self.apart)
            apart_goes_on = weight > size or (weight == size and 0 in self.apart)
            wrong = [rank for rank in end.killed if (rank in self.apart) == apart_goes_on]
            if wrong:
                return f"ranks {wrong} have ended, of the side that was to go on: {self.apart} were cut off"
        histories = {}
        for rank, outcome in enumerate(end.ranks):
            error = type(outcome.error).__name__
            if rank in end.killed and (not outcome.ended or error == "Failure"):
                continue
            if outcome.error is None and outcome.ended:
                histories[rank] = outcome.result
            elif not (error == "SystemExit" and outcome.error is not None and outcome.error.args == (0,)):
                return f"rank {rank} has ended by {end.aborted}: {outcome.trace}"
        if len(set(map(str, histories.values()))) > 1:
            return f"the ranks have made other steps: {histories}"
        limit = last + end.held + RECOVERY_SECONDS + (2 * HEARTBEAT_SECONDS if self.way == "cut" else 0.0)
        if self.apart and end.held >= HEARTBEAT_SECONDS / 2:
            # All ranks of a host stood still just after another was cut off: a limit that docs/elastic.md has.
            limit += TCP_SECONDS
        late = {rank: round(when - last, 3) for rank, when in self.done.items() if when > limit}
        if late:
            return f"ranks have trained for long after a loss: {late}"
        return self._judge_sizes(histories, size, len(end.killed))

    def _judge_sizes(self, histories: dict[int, list[tuple[int, int]]], size: int, losses: int) -> str | None:
        """Whether spares have taken the places of lost ranks."""
        for rank, history in histories.items():
            sizes = [each for _, each in history]
            least = min(size - self.spares, size - losses)
            if sizes != sorted(sizes, reverse=True) or sizes[0] > size - self.spares or sizes[-1] < least:
                return f"rank {rank} has trained with {sizes} ranks: {size} processes, {self.spares} of them spares"
        return None
