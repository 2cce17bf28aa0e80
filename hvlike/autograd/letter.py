"""What one worker tells another in one turn of one backward: everything there is to say, in one message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Gradients = Sequence[Any]
"""Of the tensors of one message that require grad, in order; None for one that nothing came to."""


@dataclass(slots=True)
class Letter:
    """Only what differs from the defaults means something."""

    gradients: dict[int, Gradients | None] = field(default_factory=dict)
    """By message of the receiver's; None: this backward does not lead to what was sent there."""
    asks: bool = False
    """The receiver shall take part, and say when it is done."""
    done: bool = False
    """What was asked for is done: the sender has finished, and so have all whom it asked."""
    marks: list[int] = field(default_factory=list)
    """Messages of the receiver's that this backward leads to; to be acknowledged."""
    acknowledged: int = 0
    """How many letters with marks have been followed to their ends."""
    error: str | None = None
    """What has gone wrong at the sender, whom the receiver has asked."""
    abort: bool = False
    """This backward has failed: nothing more comes of it."""

    @property
    def runs(self) -> bool:
        """Whether it belongs to the run itself, after all marks."""
        return self.asks or self.done or bool(self.gradients)

    @property
    def opens(self) -> bool:
        """Whether it means something to a worker that has not heard of this backward."""
        return self.asks or bool(self.marks)
