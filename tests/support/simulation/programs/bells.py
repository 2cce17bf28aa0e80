"""Random programs of hvlike's loop, its doorbells and its counters of work, with nothing above them.

Ranks of a node ring each other, arrive at pieces of work and depart from them. Whole jobs come to the moment before a
sleep a few times; these come there all the time, in a tenth of the points. Nobody is late by more than a rank was held
up for: who was not woken finds out by itself, at its next look around after 0.25 s.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

AWAY_SECONDS = 1.0
PROMPT_SECONDS = 0.2
LATE_SECONDS = 20e-6, 5e-3
CHUNK = 1024


@dataclass(frozen=True)
class Round:
    """What a rank does around a piece of work of all."""

    late: float
    """So long it sleeps before."""
    rings: Sequence[tuple[int, str]]
    """Whom it rings then, and how: from the loop, or as its driver."""
    item: float
    """So long a background thread of its runs something else; 0: it does not."""
    driven: bool
    """Whether it advances the work itself first, as a caller does, or hands it to the loop."""
    away: float
    """So long it stays away before it waits for the work."""


@dataclass
class Bells:
    """Rounds of all ranks."""

    crowded: bool
    rounds: list[list[Round]]
    """By rank, and by the number of the work."""
    late: list[str] = field(default_factory=list, repr=False)
    memory: list[Any] = field(default_factory=list, repr=False)
    rung: dict[tuple[int, int], list[float]] = field(default_factory=dict, repr=False)
    """When, by who has rung whom."""
    posted: dict[int, list[float]] = field(default_factory=dict, repr=False)
    """When the ranks have come to a piece of work, by its number."""
    here: list[int] = field(default_factory=lambda: [0, 0], repr=False)
    """How many ranks have begun, and are through."""

    @classmethod
    def draw(cls, seed: int, size: int, rounds: tuple[int, int] = (4, 20)) -> Bells:
        """Draw one. rounds: at least and at most so many."""
        draw = random.Random(seed)
        count = draw.randint(*rounds)

        def round_of(rank: int) -> Round:
            late = draw.choice([0.0, 0.0, math.exp(draw.uniform(*map(math.log, LATE_SECONDS)))])
            peers = [each for each in range(size) if each != rank]
            rings = [(draw.choice(peers), draw.choice(["post", "perform"])) for _ in range(draw.choice([0, 0, 1, 2]))]
            away = draw.choice([0.0, 0.0, 0.0, 3e-3, AWAY_SECONDS])
            item = draw.choice([0.0, 0.0, 0.0, math.exp(draw.uniform(*map(math.log, LATE_SECONDS)))])
            return Round(late, rings, item, draw.random() < 0.5, away)

        return cls(draw.random() < 0.5, [[round_of(rank) for _ in range(count)] for rank in range(size)])

    def __call__(self, hvd: Any, rank: int) -> str | None:
        """Returns what was late."""
        Rank(self, rank, len(self.rounds)).run()
        return "; ".join(self.late[:3]) or None

    def meet(self, which: int) -> None:
        """Wait for the other ranks, without a word to them."""
        from hvlike.system.system import system

        self.here[which] += 1
        while self.here[which] < len(self.rounds):
            system.sleep(1e-3)


class Rank:
    """A rank, with what it has of hvlike."""

    def __init__(self, program: Bells, rank: int, size: int) -> None:
        from hvlike.backends.shared_memory.region import Region, region_bytes
        from hvlike.backends.shared_memory.work_sync import WorkSync
        from hvlike.system.system import system
        from hvlike.transport.loop.loop import Loop
        from hvlike.transport.loop.spin import SpinPolicy
        from hvlike.transport.memory.doorbell import BELL_BYTES, Doorbell, Fence

        self.program, self.rank, self.size, self.system = program, rank, size, system
        if not program.memory:
            sizes = size * BELL_BYTES, 8 * size * size, region_bytes(size, CHUNK)
            offers: list[Any] = [system.make_offer(nbytes, 0) for nbytes in sizes]
            program.memory += [offer.segment for offer in offers]
        board, counts, work = program.memory
        fence, self.spin = Fence(), SpinPolicy(crowded=program.crowded)
        self.bells = [Doorbell(board, each, fence) for each in range(size)]
        self.bells[rank].initialise(system.process())
        self.counts = system.words(counts, 0, size * size)
        self.heard = [0] * size
        region = Region(work, rank, size, CHUNK, self.bells, fence, spin=self.spin)
        self.sync = WorkSync(region)
        self.loop = Loop(self.bells[rank], spin=self.spin, sockets=None, tick=lambda: None)
        self.loop.add_source(self.hear, lambda: False)

    def run(self) -> None:
        """All rounds."""
        self.program.meet(0)
        for number, this in enumerate(self.program.rounds[self.rank], 1):
            self.system.sleep(this.late)
            if this.item:
                self.loop.thread_pool.submit(partial(self.system.sleep, this.item))
            for peer, how in this.rings:
                getattr(self.loop, how)(lambda peer=peer: self.ring(peer))
            work = self.work(number)
            if this.driven and self.loop.advance(work, self.spin.queue_seconds):
                self.ended(number)
                self.system.sleep(this.away)
                continue
            task = self.loop.start(work, lambda task, number=number: self.ended(number), wake=this.away > 0)
            self.system.sleep(this.away)
            self.loop.wait(lambda task=task: task.done)
            assert task.error is None, task.error
        # What was not heard of is so late then that it shows.
        self.system.sleep(AWAY_SECONDS)
        self.program.meet(1)
        self.loop.close()
        for peer in range(self.size):
            rung = len(self.program.rung.get((peer, self.rank), ()))
            assert self.heard[peer] == rung, f"rank {self.rank} has heard {self.heard[peer]} of {rung} of rank {peer}"

    def work(self, number: int) -> Iterator[Any]:
        """Arrive with all others, and depart."""
        self.sync.begin(number, 0)
        self.program.posted.setdefault(number, []).append(self.system.monotonic())
        yield from self.sync.arrive(number)
        yield from self.sync.depart(number)

    def ended(self, number: int) -> None:
        """The work is over for this rank."""
        self.check(f"is through with work {number}", self.program.posted[number][-1])

    def ring(self, peer: int) -> None:
        """Tell it something. In the loop."""
        self.program.rung.setdefault((self.rank, peer), []).append(self.system.monotonic())
        self.counts[self.rank * self.size + peer] += 1
        self.bells[peer].ring()

    def hear(self, rung: bool) -> Any:
        """The source of the loop: as messages do, it looks only when somebody has rung."""
        from hvlike.transport.loop.coroutine import Wait

        wait = Wait.NOTIFY
        for peer in range(self.size) if rung else ():
            while self.heard[peer] < self.counts[peer * self.size + self.rank]:
                self.check(f"hears of rank {peer}", self.program.rung[peer, self.rank][self.heard[peer]])
                self.heard[peer] += 1
                wait = Wait.AGAIN
        return wait

    def check(self, what: str, since: float) -> None:
        """Note who is late."""
        seconds = self.system.monotonic() - since
        if seconds > PROMPT_SECONDS:
            self.program.late.append(f"rank {self.rank} {what} {seconds:.3f} s late")
