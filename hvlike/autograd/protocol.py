"""The protocol of one backward on one worker: which messages it sends, when it is over, what an error does. Pure.

The local graph is behind a `Machine`. Messages between two workers arrive in order, those of different pairs in any
order. Every worker that takes part answers each message whose tensors it has received: with gradients, or with None
where this backward does not lead to them. So no worker waits for ever.

    SAFE    all sends of a context count
    FAST    the same, but a send that gets None is an error
    SMART   the sends that the backward leads to are marked first; only these count, and nothing is said of others

A worker with an error reports it to its parent, up to the root, and aborts all workers that it has sent anything to.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hvlike.autograd.termination import Marking, Termination

Gradients = Sequence[Any]
"""Of the tensors of one message that require grad, in order; None for one that nothing came to."""


@dataclass(slots=True)
class BackwardMessage:
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


class Mode(enum.IntEnum):
    """See the head of this file."""

    FAST = 0
    SAFE = 1
    SMART = 2


class Phase(enum.Enum):
    """How far a worker has come."""

    OUTSIDE = enum.auto()
    """It does not take part, or not yet."""
    RUNNING = enum.auto()
    FINISHED = enum.auto()
    FAILED = enum.auto()


class Machine(Protocol):
    """The local part of a backward. It tells Part.emit about every message that came here, once."""

    @property
    def finished(self) -> bool:
        """Everything has run."""

    def reach(self, sends: Collection[int] | None) -> Mapping[int, int]:
        """Go on from some sends, or from the roots; return what is reached newly: messages that came, their senders."""

    def engage(self, sends: Collection[int] | None) -> Mapping[int, int]:
        """Begin the run; return what it waits for: messages that were sent from here, and to whom.

        sends: those that count; None: all.
        """

    def resolve(self, message: int, gradients: Gradients | None) -> None:
        """Take what has come for a message that was sent from here."""

    def step(self) -> None:
        """Run what can run. Raises: what the user's code raises."""

    def unused(self, message: int) -> str:
        """What to say in FAST of a message that was sent from here and that the backward does not lead to."""


class BackwardState:
    """Not thread-safe, but for `emit`. After every event: `advance`, then send what `take_letters` returns."""

    def __init__(self, rank: int, mode: Mode, machine: Machine) -> None:
        self.rank = rank
        self.state = Phase.OUTSIDE
        self.error: str | None = None
        """Why it has failed."""
        self.engagement = Termination()
        self._mode = mode
        self._machine: Machine | None = machine
        self._marking = Marking()
        self._marked: set[int] = set()
        self._waits: dict[int, int] = {}
        self._emitted: deque[tuple[int, int, Gradients | None]] = deque()
        self._late: list[tuple[int, int]] = []
        self._letters: dict[int, BackwardMessage] = {}
        self._written_to: set[int] = set()
        self._is_root = False
        self._origin: int | None = None
        """Who has sent the first letter: an error goes there as long as there is no parent."""

    # -- events -------------------------------------------------------------------------------

    def begin(self) -> None:
        """The backward begins here: this worker is the root."""
        self._is_root = True
        if self._mode is Mode.SMART:
            self._marking.begin(None)
            self._mark(None)
        else:
            self._join(None)

    def hear(self, source: int, letter: BackwardMessage) -> None:
        """A letter has come."""
        if self._origin is None and not self._is_root:
            self._origin = source
        if self.state is Phase.FAILED:
            if letter.asks or letter.marks:
                self._to(source).error = self.error
        elif self.state is Phase.FINISHED:
            if letter.asks:
                self._answer_late(source)
        elif letter.abort:
            # Not when another one has asked this worker: that one tells it, and by then the root knows why.
            if source == self._superior:
                self._end(Phase.FAILED, f"worker {source} has aborted it")
                self._abort(source)
        elif letter.error is not None:
            self.fail(letter.error)
        else:
            self._hear_marks(source, letter)
            self._hear_run(source, letter)

    def emit(self, message: int, rank: int, gradients: Gradients | None) -> None:
        """The machine has something to say to the sender of a message that came here. From any thread."""
        self._emitted.append((message, rank, gradients))

    def recorded(self, message: int, rank: int) -> None:
        """A message has been opened that the machine does not know: nothing leads to it."""
        if self._mode is Mode.SMART or self.state in (Phase.OUTSIDE, Phase.FAILED):
            return
        if self.state is Phase.RUNNING:
            self.emit(message, rank, None)
        elif rank != self.rank:
            # Its sender may wait for this; it is not asked to take part if it does not.
            self._late.append((message, rank))
            self._to(rank).gradients[message] = None

    def withdrawn(self, message: int) -> None:
        """A message of this worker will never be opened: nothing comes for it."""
        if self.state is Phase.RUNNING and self._waits.pop(message, None) is not None and self._machine is not None:
            self._machine.resolve(message, None)

    def lost(self, rank: int, error: str) -> None:
        """A worker is gone."""
        if self._is_over:
            return
        if rank == self._superior:
            self._end(Phase.FAILED, f"Error on Node {self.rank}: {error}")
            self._abort(rank)
        elif rank in self._written_to or rank in self._waits.values() or rank in self._letters:
            self.fail(error)

    def fail(self, error: str) -> None:
        """Something has gone wrong: here, or at a worker that was asked from here."""
        if self._is_over:
            return
        superior = self._superior
        self._end(Phase.FAILED, f"Error on Node {self.rank}: {error}")
        self._abort(superior)
        if superior is not None:
            self._to(superior).error = self.error

    # -- what follows from them -----------------------------------------------------------------

    def advance(self) -> None:
        """Do what can be done. Raises: what the user's code raises; `fail` is then to be called."""
        self._close_marking()
        while self.state is Phase.RUNNING and self._machine is not None:
            self._machine.step()
            if not self._pass_on():
                self._start_others()
                self._finish()
                return

    def take_letters(self) -> dict[int, BackwardMessage]:
        """What is to be sent now, by rank."""
        letters, self._letters = self._letters, {}
        for rank, letter in letters.items():
            if letter.marks:
                self._marking.sent(rank)
        self._written_to.update(letters)
        return letters

    @property
    def open(self) -> list[int]:
        """The workers that this one waits for: those it has asked, those that have not answered a letter or message."""
        waited_for = self.engagement.asked.union(self._waits.values(), self._marking.unacknowledged)
        return sorted(waited_for - {self.rank})

    # -- marks ----------------------------------------------------------------------------------

    def _hear_marks(self, source: int, letter: BackwardMessage) -> None:
        self._marking.acknowledged(source, letter.acknowledged)
        if letter.marks:
            first = self._marking.begin(source)
            self._mark(letter.marks)
            if not first:
                self._to(source).acknowledged += 1

    def _mark(self, sends: Iterable[int] | None) -> None:
        """Follow marks of this worker's sends, or the roots."""
        machine = self._machine
        while machine is not None and (sends is None or sends):
            new = None if sends is None else set(sends) - self._marked
            self._marked |= new or set()
            sends = []
            for message, rank in machine.reach(new).items():
                if rank == self.rank:
                    sends.append(message)
                else:
                    self._to(rank).marks.append(message)

    def _close_marking(self) -> None:
        marking = self._marking
        if not marking.goes_on or any(letter.marks for letter in self._letters.values()) or not marking.ends():
            return
        if self._marking.parent is None:
            self._join(None)
        else:
            self._to(self._marking.parent).acknowledged += 1

    # -- the run ----------------------------------------------------------------------------------

    def _hear_run(self, source: int, letter: BackwardMessage) -> None:
        if letter.asks:
            if self.engagement.takes_part:
                self._to(source).done = True
            else:
                self._join(source)
        if self.state is not Phase.RUNNING:
            # Of somebody who had finished before this worker was asked; it will be told again.
            return
        if letter.runs:
            self.engagement.hear(source, done=letter.done)
        for message, gradients in letter.gradients.items():
            self._resolve(message, gradients)

    def _join(self, parent: int | None) -> None:
        if self._machine is not None:
            self.state = Phase.RUNNING
            self.engagement.join(parent)
            self._waits = dict(self._machine.engage(self._marked if self._mode is Mode.SMART else None))

    def _resolve(self, message: int, gradients: Gradients | None) -> None:
        if self._machine is None or self._waits.pop(message, None) is None:
            return
        if gradients is None and self._mode is Mode.FAST:
            self.fail(self._machine.unused(message))
        else:
            self._machine.resolve(message, gradients)

    def _pass_on(self) -> bool:
        """Address what the machine has emitted; True when some of it was for this worker itself."""
        own = False
        while self._emitted:
            message, rank, gradients = self._emitted.popleft()
            if rank == self.rank:
                own = True
                self._resolve(message, gradients)
            else:
                self._to_run(rank).gradients[message] = gradients
        return own

    def _start_others(self) -> None:
        """Whoever is waited for has to take part: if it got no tensor in return, nothing else tells it to."""
        for rank in set(self._waits.values()) - {self.rank}:
            if not self.engagement.knows(rank):
                self._to_run(rank)

    def _finish(self) -> None:
        if self._waits or self.engagement.asked or self._machine is None or not self._machine.finished:
            return
        if self.engagement.parent is not None:
            self._to(self.engagement.parent).done = True
        self._end(Phase.FINISHED, None)

    # -- letters ----------------------------------------------------------------------------------

    def _to(self, rank: int) -> BackwardMessage:
        """The letter to a worker that is sent after this turn."""
        letter = self._letters.get(rank)
        if letter is None:
            letter = self._letters[rank] = BackwardMessage()
        return letter

    def _to_run(self, rank: int) -> BackwardMessage:
        """The same; the worker has to take part."""
        letter = self._to(rank)
        letter.asks = self.engagement.tell(rank) or letter.asks
        return letter

    def _answer_late(self, source: int) -> None:
        """This worker has finished before somebody asked it: what it knows of messages that were opened later."""
        letter = self._to(source)
        letter.done = True
        letter.gradients.update((message, None) for message, rank in self._late if rank == source)

    def _end(self, state: Phase, error: str | None) -> None:
        self.state = state
        self.error = error
        self._machine = None
        self._waits = {}
        self._emitted.clear()

    @property
    def _is_over(self) -> bool:
        return self.state is Phase.FAILED or self.state is Phase.FINISHED

    @property
    def _superior(self) -> int | None:
        """Who has to hear of an error; None at the root."""
        return self.engagement.parent if self.engagement.takes_part else self._origin

    def _abort(self, but: int | None) -> None:
        """Tell all who may know of this backward from here, except for one."""
        self._letters.clear()
        for rank in self._written_to - {but}:
            self._to(rank).abort = True
