"""Jobs in which one rank is killed, fails or leaves beside all kinds of work; docs/failures.md says what happens then.

    killed     at any point; the launcher ends the job soon, or so late that the others notice first
    raises     an exception that nobody catches           the job ends with status 1
    exits      sys.exit(3)                                the job ends with status 3
    ends       the program ends too early                 what needs this rank raises PeerLeftError on the others
    leaves     it calls shutdown() too early              the same with ShutdownError

The others let their error pass, or catch it and end their program, with shutdown() or without.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from support.simulation.machine.job import JobEnd, Kill
from support.simulation.programs.parts import KINDS_OF_OPERATIONS, Operation, expect, loss_of, make_model

import hvlike.torch_distributed.process_group  # noqa: F401 - what belongs to a rank is known before the job begins
from hvlike import rpc

STEPS = ("named", "inline", "train", "join", "barrier", "objects", "set", "zero", "torch", "message", "rpc")
WAYS = ("killed", "killed", "killed", "raises", "exits", "ends", "leaves")
NOTICE_SECONDS = 3.0
"""From a loss, or from the moment at which a rank leaves, until the others have an error, if they need that rank."""
END_SECONDS = 8.0
"""The same until the job has ended: exit handlers may take five."""
LATE_SECONDS = 20.0
"""What a launcher takes that is later than that."""
IN_CALLS = 0.1  # Of the jobs: the first rank is killed in small calls
CALLS = 60
IN_SETS = 0.1  # Of the jobs: the culprit leaves as soon as a process set is there, for itself
POINTS_BEFORE = 700  # Until the ranks of a small job are through init


class Failure(Exception):
    """What the program of a rank raises."""


@dataclass
class Lost:
    """Steps that all ranks make, and what the culprit does in place of one of them."""

    steps: list[str]
    culprit: int
    way: str
    at: int  # A step, or a number of points
    reaction: str  # Of the others: raise, return, shutdown
    launcher_seconds: float
    seed: int
    began: dict[int, float] = field(default_factory=dict, compare=False, repr=False)  # When each rank was through init
    failed: dict[int, float] = field(default_factory=dict, compare=False, repr=False)  # When it met an error
    acted: list[float] = field(default_factory=list, compare=False, repr=False)  # When the culprit has failed or left
    sets: dict[int, Any] = field(default_factory=dict, compare=False, repr=False)  # Of every other rank, by member

    @classmethod
    def draw(cls, seed: int, size: int) -> Lost:
        """Draw one."""
        draw = random.Random(seed)
        kinds = draw.sample(STEPS, 4)
        steps = [draw.choice(kinds) for _ in range(draw.randint(2, 8))]
        way = draw.choice(WAYS)
        at = int(draw.expovariate(1 / 1_500)) if way == "killed" else draw.randrange(len(steps))
        reaction = draw.choice(["raise", "return", "shutdown"])
        job = cls(steps, draw.randrange(size), way, at, reaction, draw.choice([0.02, 0.6, LATE_SECONDS]), seed)
        if draw.random() < IN_CALLS:
            # Who decides for all that they make a call now is gone between two of its stores.
            at = POINTS_BEFORE + int(draw.expovariate(1 / 1_500))
            return replace(job, steps=["inline"] * CALLS, culprit=0, way="killed", at=at, launcher_seconds=LATE_SECONDS)
        if draw.random() < IN_SETS and size > 2:
            return replace(job, steps=["new set"], way=draw.choice(["leaves", "ends"]), at=0)
        return job

    def options(self) -> dict[str, Any]:
        """What `simulate` is to be given."""
        kills = [Kill(self.at, self.culprit)] if self.way == "killed" else []
        return {"kills": kills, "launcher_seconds": self.launcher_seconds}

    def __call__(self, hvd: Any, rank: int) -> None:
        from hvlike.system.system import system

        hvd.init()
        self.began[rank] = system.monotonic()
        try:
            self._prepare(hvd, rank)
            model = make_model()
            sgd = torch.optim.SGD(model.parameters(), lr=0.05)
            optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())
            for number, step in enumerate(self.steps):
                if step == "new set":
                    self.sets[rank] = hvd.add_process_set(sorted({self.culprit, (self.culprit + 1) % hvd.size()}))
                if number == self.at and rank == self.culprit and self.way != "killed":
                    self.acted.append(system.monotonic())
                    if self._act(hvd):
                        return
                self._make(step, number, hvd, rank, model, optimizer)
            if "rpc" in self.steps:
                rpc.shutdown()
            if dist.is_initialized():
                dist.destroy_process_group()
        except hvd.HorovodInternalError:
            self.failed[rank] = system.monotonic()
            if self.reaction == "raise":
                raise
            if self.reaction == "return":
                return
        hvd.shutdown()

    def _prepare(self, hvd: Any, rank: int) -> None:
        if "rpc" in self.steps:
            rpc.init_rpc(f"worker{hvd.rank()}", num_worker_threads=2)
        if not {"torch", "message"}.isdisjoint(self.steps):
            dist.init_process_group("hvlike")
        if "set" in self.steps and hvd.size() > 1:
            self.sets[rank] = hvd.add_process_set(range(0, hvd.size(), 2))

    def _act(self, hvd: Any) -> bool:
        """The culprit's deed; whether it ends its program."""
        if self.way == "raises":
            raise Failure
        if self.way == "exits":
            sys.exit(3)
        if self.way == "leaves":
            hvd.shutdown()
        return True

    def _make(self, step: str, number: int, hvd: Any, rank: int, model: Any, optimizer: Any) -> None:
        size = hvd.size()
        if step == "named":
            draw = random.Random(1000 * self.seed + number)
            operations = [
                Operation(
                    100 * number + each, draw.choice(KINDS_OF_OPERATIONS), draw.choice((3, 20_000)), 0, range(size)
                )
                for each in range(3)
            ]
            random.Random(rank).shuffle(operations)
            for end in [each.begin(hvd, rank, hvd.global_process_set) for each in operations]:
                end()
        elif step == "inline":
            found = hvd.allreduce(torch.full((3,), float(rank)), op=hvd.Sum)
            expect(found, torch.full((3,), size * (size - 1) / 2), f"rank {rank}: inline")
        elif step == "train":
            self._train(number, rank, model, optimizer)
        elif step == "join":
            from hvlike.join import Join

            with Join([optimizer]):
                for each in range((rank + number) % 3):
                    self._train(number + each, rank, model, optimizer)
        elif step == "set" and rank % 2 == 0 and size > 1:
            found = hvd.allreduce(torch.ones(700), name=f"set {number}", op=hvd.Sum, process_set=self.sets[rank])
            expect(found, torch.full((700,), float((size + 1) // 2)), f"rank {rank}: set")
        elif step == "new set" and self.sets[rank].included():
            hvd.allreduce(torch.ones(700), name="new set", process_set=self.sets[rank])
        elif step == "zero":
            self._train(number, rank, model, self._zero(hvd, model))
        elif step in ("torch", "message", "rpc"):
            self._beside(step, number, rank, size)
        elif step == "barrier":
            hvd.barrier()
        elif step == "objects":
            expect(hvd.allgather_object(rank), list(range(size)), f"rank {rank}: objects")

    def _zero(self, hvd: Any, model: Any) -> Any:
        """ZeRO for a step of its own."""
        return hvd.optim.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, reduce_gradients=True, lr=0.05)

    def _beside(self, step: str, number: int, rank: int, size: int) -> None:
        """What does not use hvlike's own calls."""
        if step == "torch":
            found = torch.full((700,), float(rank))
            dist.all_reduce(found)
            expect(found, torch.full((700,), size * (size - 1) / 2), f"rank {rank}: torch")
        elif step == "message" and size > 1:
            found, mine = torch.zeros(20_000), torch.full((20_000,), float(rank))
            works = [dist.isend(mine, (rank + 1) % size), dist.irecv(found, (rank - 1) % size)]
            for each in works:
                each.wait()
            expect(found, torch.full((20_000,), float((rank - 1) % size)), f"rank {rank}: message")
        elif step == "rpc":
            assert rpc.rpc_sync(f"worker{(rank + 1) % size}", max, (number, rank)) == max(number, rank)

    def _train(self, number: int, rank: int, model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        loss_of(model, number, rank).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    def judge(self, end: JobEnd) -> str | None:
        """Why the job has not ended as it should; None if it has."""
        if end.hang is not None:
            return f"it hangs: {end.hang}"
        for rank, outcome in enumerate(end.ranks):
            error = type(outcome.error).__name__
            own = {"raises": "Failure", "exits": "SystemExit"}.get(self.way) if rank == self.culprit else None
            if outcome.error is None or error == own:
                continue
            # Of a lost rank shutdown() tells, too.
            is_told = self.reaction == "raise" or self.way == "killed"
            known = ("PeerLeftError", "ShutdownError", "WorkerLostError")
            if error == "JoinError" and "join" in self.steps and any(each in str(outcome.error) for each in known):
                # Another rank has met it first in their Join context, and tells of it.
                error = "PeerLeftError"
            if error not in known or not is_told:
                return f"rank {rank}: {outcome.trace}"
        when = end.gone[self.culprit] if self.way == "killed" else min(self.acted, default=end.seconds)
        if not (end.killed or self.acted):
            return None
        wanted = {"raises": (self.culprit, 1), "exits": (self.culprit, 3)}.get(self.way)
        if wanted is not None and end.aborted != wanted:
            return f"the job ended by {end.aborted}, not {wanted}"
        began = all(rank in self.began and self.began[rank] <= when for rank in range(len(end.ranks)))
        if self.way == "killed" and (end.nodes > 1 or not began):
            # The launcher ends the job: the others cannot know.
            return None
        limit = when + end.held + NOTICE_SECONDS
        late = {rank: round(seconds - when, 3) for rank, seconds in self.failed.items() if seconds > limit}
        if late:
            return f"ranks have met an error late: {late}"
        took = max(end.gone.values()) - when
        return f"the job ended {took:.3f} s after it" if took > end.held + END_SECONDS else None
