"""Random programs that look at the clock: what needs nothing of a rank any more does not wait for it.

All ranks begin an operation at about the same time. Then some of them stay away from hvlike, so that nothing hides a
wake-up that was forgotten: a rank that was not woken finds out by itself, at its next look around after 0.25 s.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import torch
from support.simulation.programs.calls import BLOCKING, DTYPES, IN_PLACE_LENGTH, LENGTHS, Call, Caller
from support.simulation.programs.parts import expect

AWAY_SECONDS = 1.0
LATE_SECONDS = 50e-6, 5e-3
PROMPT_SECONDS = 0.2
"""What the operations of this file take at most in a job in which no rank is held up."""


@dataclass
class Round:
    """What follows a barrier."""

    call: Call
    times: int
    begun: list[int]
    """The lengths of reductions that are under way meanwhile; nobody waits for them."""
    away: list[int]
    """The ranks that stay away afterwards."""
    late: dict[int, float]
    """Ranks that come later to the last of the operations, and by how many seconds: others are about to sleep then."""

    @property
    def limit(self) -> float:
        """How long it may take, in seconds. Eight ranks on three nodes need 0.09 s for tensors of megabytes."""
        return PROMPT_SECONDS + 0.1 * self.times * (self.call.length == IN_PLACE_LENGTH)


@dataclass
class Prompt:
    """Rounds of operations after which ranks stay away."""

    rounds: list[Round]

    @classmethod
    def draw(cls, seed: int, size: int) -> Prompt:
        """Draw one."""
        draw = random.Random(seed)
        rounds = []
        for _ in range(draw.randint(1, 4)):
            what = draw.choice(BLOCKING + ("allreduce_",) * 6)
            name = draw.choice([None, "loss", what])
            length = draw.choice((*LENGTHS, *[IN_PLACE_LENGTH] * 3))
            call = Call(what, name, length, draw.choice(DTYPES), draw.randrange(size), "", 0, 1)
            begun = draw.choices(LENGTHS, k=draw.choice([0, 0, 1, 2]))
            away = draw.sample(range(size), draw.choice([1, 1, size - 1, size]))
            late = draw.sample(range(size), draw.choice([0, 1, 1, size - 1]))
            seconds = {rank: math.exp(draw.uniform(*map(math.log, LATE_SECONDS))) for rank in late}
            rounds.append(Round(call, draw.choice([1, 2, 3, 5]), begun, away, seconds))
        return cls(rounds)

    def __call__(self, hvd: Any, rank: int) -> str | None:
        """Returns what was late."""
        hvd.init()
        caller, late = Caller(hvd, rank), ""
        for number, each in enumerate(self.rounds):
            found = self.run(hvd, caller, each, number)
            late = late or found
        hvd.shutdown()
        return late or None

    def run(self, hvd: Any, caller: Caller, this: Round, number: int) -> str:
        """Run a round; returns what was late."""
        from hvlike.system.system import system

        rank, size = caller.rank, caller.size
        hvd.barrier()
        began = system.monotonic()
        for _ in range(this.times - 1):
            caller.take(this.call, number)
        if rank in this.late:
            system.sleep(this.late[rank])
        # Just before the last one, which may be through earlier: inline calls pass by the queue.
        handles = [
            hvd.allreduce_async_(torch.full((length,), float(rank)), op=hvd.Sum, name=f"{number}.{place}")
            for place, length in enumerate(this.begun)
        ]
        caller.take(this.call, number)
        took = system.monotonic() - began
        late = f"rank {rank}: {this.call.what} of round {number}: {took:.3f} s" if took > this.limit else ""
        if rank in this.away:
            system.sleep(AWAY_SECONDS)
            if not all(hvd.poll(each) for each in handles):
                late = late or f"rank {rank}: what was begun in round {number} is not done after {AWAY_SECONDS} s"
        for length, handle in zip(this.begun, handles, strict=True):
            expect(hvd.synchronize(handle), torch.full((length,), size * (size - 1) / 2), f"rank {rank}: begun")
        took = system.monotonic() - began
        if rank not in this.away and took > this.limit:
            late = late or f"rank {rank}: what was begun in round {number}: {took:.3f} s"
        return late
