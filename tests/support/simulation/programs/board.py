"""Random programs of the board alone, by which ranks of a node agree on inline operations.

Each rank offers or passes operations one after the other, and reads what the others have written while they replace it:
whole jobs come to these moments rarely. All ranks must decide alike, and only on the same operation.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

LATE_SECONDS = 20e-6
"""So long a rank sleeps at most between two looks or operations."""
LONGEST_SECONDS, MOST_SECONDS = 1e-3, 60.0
"""Between two looks at what does not come, and until it never will."""
LINE_WORDS = 16


@dataclass(frozen=True)
class Turn:
    """What a rank does with one operation."""

    offers: bool
    """Else it passes."""
    name: int
    late: float
    """So long it sleeps before."""
    reads: float
    """So long it reads the memory of the others for it."""


@dataclass
class Boards:
    """The operations of all ranks."""

    looks: int
    """How often a rank looks at once for those that have not come."""
    turns: list[list[Turn]]
    """By rank and number."""
    memory: list[Any] = field(default_factory=list, repr=False)
    answers: dict[int, set[bool]] = field(default_factory=dict, repr=False)
    """Of the ranks that have offered an operation, by its number."""
    done: list[int] = field(default_factory=list, repr=False)

    @classmethod
    def draw(cls, seed: int, size: int) -> Boards:
        """Draw one."""
        draw = random.Random(seed)
        turns: list[list[Turn]] = [[] for _ in range(size)]
        for _ in range(draw.randint(5, 40)):
            names = [0] * size
            if draw.random() < 0.3:
                names[draw.randrange(size)] = 1
            passes = draw.randrange(size) if draw.random() < 0.3 else -1
            for rank in range(size):
                late, reads = (draw.choice([0.0, 0.0, draw.random() * LATE_SECONDS]) for _ in range(2))
                turns[rank].append(Turn(rank != passes, names[rank], late, reads))
        return cls(draw.choice([0, 1, 5]), turns)

    def __call__(self, hvd: Any, rank: int) -> str | None:
        """Returns what the ranks have decided differently."""
        from hvlike.backends.shared_memory.board import WORDS, Board
        from hvlike.system.system import system
        from hvlike.transport.memory.doorbell import Fence

        size = len(self.turns)
        if not self.memory:
            self.memory.append(system.make_offer(8 * LINE_WORDS * size, 0).segment)
        blocks = [system.words(self.memory[0], 8 * LINE_WORDS * each, WORDS) for each in range(size)]
        fence = Fence()
        board = Board(blocks, rank, fence.barrier, None if system.orders_stores else fence, lambda: None, self.looks)
        for index, turn in enumerate(self.turns[rank]):
            system.sleep(turn.late)
            if not turn.offers:
                board.passed(index + 1)
                continue
            wait_for(lambda index=index: board.is_free(index) or None)
            answer = board.offer(index, 7, turn.name)
            if answer is None:
                answer = wait_for(lambda index=index: board.look(index))
            self.answers.setdefault(index, set()).add(answer)
            if answer:
                same = {(each[index].offers, each[index].name) for each in self.turns}
                assert same == {(True, turn.name)}, f"operation {index} is done inline, and others wanted {same}"
                system.sleep(turn.reads)
                board.finish(index)
        self.done.append(rank)
        while len(self.done) < size:
            system.sleep(1e-3)
        parted = [index for index, found in self.answers.items() if len(found) > 1]
        return f"operations {parted[:3]} are done inline by some of those that offered them" if parted else None


def wait_for(look: Callable[[], bool | None]) -> bool:
    """Look until there is an answer."""
    from hvlike.system.system import system

    end, pause = system.monotonic() + MOST_SECONDS, LATE_SECONDS
    while (answer := look()) is None:
        assert system.monotonic() < end, "an operation is never decided"
        system.sleep(pause)
        pause = min(2 * pause, LONGEST_SECONDS)
    return answer
