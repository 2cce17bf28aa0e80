"""The protocol of one backward on one worker: which messages it sends, when it is over, what an error does. Pure.

The local graph is behind a `Machine`. Messages between two workers arrive in order, those of different pairs in any
order. Every worker that takes part answers each send whose tensors it has received: with gradients, or with None
where this backward does not lead to them. So no worker waits for ever.

    SAFE    all sends of a context count
    FAST    the same, but a send that gets None is an error
    SMART   the sends that the backward leads to are marked first; only these count and are answered

    root            When is a backward over? The first worker that asks another one to take part becomes its parent. A
    |-- a           worker reports "done" to its parent when its own part is finished and all workers that it has asked
    |   '-- c       have reported. A worker that takes part already answers "done" at once. So the root is the last.
    '-- b

Marks of SMART spread from the root along the messages. Each message with marks is acknowledged once all messages that
it has caused have been. A worker with unacknowledged messages acknowledges further ones at once, and the first one at
the end; after that it may be reached again. When the root has all acknowledgements, everything is marked.

A worker with an error reports it to its parent, up to the root, and aborts all workers that it has sent anything to.

Source: E. W. Dijkstra and C. S. Scholten, Termination detection for diffusing computations, 1980.
"""

from __future__ import annotations

import enum
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Gradients = Sequence[Any]  # Of the tensors of one send, in order. None stands for a tensor that got no gradient.


@dataclass(slots=True)
class BackwardMessage:
    """What one worker sends to another one after one event. Fields at their defaults say nothing."""

    gradients: dict[int, Gradients | None] = field(default_factory=dict)  # By send of the receiver. None: not reached.
    asks: bool = False  # The receiver shall take part, and report when it is done
    done: bool = False  # The sender has finished, and so have all workers that it has asked
    marks: list[int] = field(default_factory=list)  # Sends of the receiver that this leads to. To be acknowledged.
    acknowledged: int = 0  # How many messages with marks have been followed to the end
    error: str | None = None  # What has failed at the sender, which the receiver has asked
    lost: tuple[int, ...] | None = None  # The workers whose loss the error tells of
    abort: bool = False  # This backward has failed

    @property
    def opens(self) -> bool:
        """Whether it concerns a worker that does not know this backward."""
        return self.asks or bool(self.marks)


class Mode(enum.IntEnum):
    """Which sends of a context count; see the head of this file."""

    FAST = 0
    SAFE = 1
    SMART = 2


class BackwardPhase(enum.Enum):
    """How far a worker has come. OUTSIDE: it does not take part, or not yet."""

    OUTSIDE = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()
    FAILED = enum.auto()


class Machine(Protocol):
    """The local part of a backward, see LocalBackward. It calls BackwardState.emit once for every recv.

    A send is a message that left this worker with tensors that require grad, a recv is one that arrived. Both are
    known by the id of the message. `sends`: None stands for all sends.
    """

    @property
    def finished(self) -> bool: ...

    def reach(self, sends: Collection[int] | None) -> Mapping[int, int]: ...
    def engage(self, sends: Collection[int] | None) -> Mapping[int, int]: ...
    def resolve(self, send: int, gradients: Gradients | None) -> None: ...
    def step(self) -> None: ...
    def describe_unused(self, send: int, rank: int) -> str: ...


class BackwardState:
    """The part of one worker in one backward.

    Not thread-safe, except for `emit`. After every event call `advance`, then send what `take_messages` returns.
    """

    def __init__(self, rank: int, mode: Mode, machine: Machine) -> None:
        self.rank = rank
        self.phase = BackwardPhase.OUTSIDE
        self.error: str | None = None
        self.lost_ranks: tuple[int, ...] | None = None  # With an error that tells of lost workers
        self._takes_part = False
        self._parent: int | None = None  # The worker that has asked first; None at the root
        self._asked: set[int] = set()  # The workers that this one has asked and that have not reported
        self._known: set[int] = set()  # The workers that take part or have been asked to
        self._is_marking = False
        self._mark_parent: int | None = None  # The worker whose marks are acknowledged at the end; None at the root
        self._unacknowledged: Counter[int] = Counter()  # This worker's own messages with marks, by receiver
        self._mode = mode
        self._machine: Machine | None = machine
        self._marked: set[int] = set()
        self._waits: dict[int, int] = {}
        self._emitted: deque[tuple[int, int, Gradients | None]] = deque()
        self._late: list[tuple[int, int]] = []  # Recvs that were opened after this worker had finished, and their ranks
        self._outgoing: defaultdict[int, BackwardMessage] = defaultdict(BackwardMessage)  # Sent after this event
        self._sent_to: set[int] = set()
        self._is_root = False
        self._origin: int | None = None  # Sender of the first message, told of an error while there is no parent

    @property
    def is_over(self) -> bool:
        """Whether it has ended on this worker, well or badly."""
        return self.phase is BackwardPhase.FAILED or self.phase is BackwardPhase.FINISHED

    @property
    def awaited(self) -> list[int]:
        return sorted(self._asked.union(self._waits.values(), self._unacknowledged) - {self.rank})

    def begin(self) -> None:
        self._is_root = True
        if self._mode is Mode.SMART:
            self._is_marking = True
            self._mark(None)
        else:
            self._join(None)

    def receive(self, source: int, message: BackwardMessage) -> None:
        if self._origin is None and not self._is_root:
            self._origin = source
        if self.phase is BackwardPhase.FAILED:
            if message.opens:
                self._report_to(source)
        elif self.phase is BackwardPhase.FINISHED:
            if message.asks:
                self._answer_late(source)
        elif message.abort:
            # Only from the superior: the root knows the reason by the time that one is told.
            if source == self._superior:
                self._end(BackwardPhase.FAILED, f"worker {source} has aborted it")
                self._abort(source)
        elif message.error is not None:
            self.fail(message.error, message.lost)
        else:
            self._receive_marks(source, message)
            self._receive_run(source, message)

    def emit(self, recv: int, rank: int, gradients: Gradients | None) -> None:
        """The machine has an answer for the sender of a recv. From any thread."""
        self._emitted.append((recv, rank, gradients))

    def recorded(self, recv: int, rank: int) -> None:
        """A recv has been opened that the machine does not know: nothing leads to it."""
        if self._mode is Mode.SMART or self.phase in (BackwardPhase.OUTSIDE, BackwardPhase.FAILED):
            return
        if self.phase is BackwardPhase.RUNNING:
            self.emit(recv, rank, None)
        elif rank != self.rank:
            # Its sender may wait for this answer. It is not asked to take part if it does not already.
            self._late.append((recv, rank))
            self._outgoing[rank].gradients[recv] = None

    def withdrawn(self, send: int) -> None:
        """A send will never be opened: no gradient comes for it."""
        if (
            self.phase is BackwardPhase.RUNNING
            and self._waits.pop(send, None) is not None
            and self._machine is not None
        ):
            self._machine.resolve(send, None)

    def lost(self, rank: int, error: str) -> None:
        if self.is_over:
            return
        if rank == self._superior:
            self._end(BackwardPhase.FAILED, f"Error on Node {self.rank}: {error}")
            self.lost_ranks = (rank,)
            self._abort(rank)
        elif rank in self._sent_to or rank in self._waits.values() or rank in self._outgoing:
            self.fail(error, (rank,))

    def fail(self, error: str, lost: tuple[int, ...] | None = None) -> None:
        """Something has failed: here, or at a worker that was asked from here. lost: because these workers are gone."""
        if self.is_over:
            return
        superior = self._superior
        self._end(BackwardPhase.FAILED, f"Error on Node {self.rank}: {error}")
        self.lost_ranks = lost
        self._abort(superior)
        if superior is not None:
            self._report_to(superior)

    def advance(self) -> None:
        """Do what can be done. Raises: what the user's code raises; call `fail` then."""
        self._close_marking()
        while self.phase is BackwardPhase.RUNNING and self._machine is not None:
            self._machine.step()
            if not self._address_emitted():
                self._ask_awaited()
                self._finish()
                return

    def take_messages(self) -> dict[int, BackwardMessage]:
        outgoing, self._outgoing = self._outgoing, defaultdict(BackwardMessage)
        for rank, message in outgoing.items():
            if message.marks:
                self._unacknowledged[rank] += 1
        self._sent_to.update(outgoing)
        return outgoing

    def _receive_marks(self, source: int, message: BackwardMessage) -> None:
        if message.acknowledged:
            # Leaves out what is at 0.
            self._unacknowledged -= Counter({source: message.acknowledged})
        if message.marks:
            was_marking = self._is_marking
            if not was_marking:
                self._is_marking, self._mark_parent = True, source
            self._mark(message.marks)
            if was_marking:
                self._outgoing[source].acknowledged += 1

    def _mark(self, sends: Iterable[int] | None) -> None:
        """Follow marks of sends, None: of the roots."""
        machine = self._machine
        while machine is not None and (sends is None or sends):
            new = None if sends is None else set(sends) - self._marked
            self._marked |= new or set()
            sends = []
            for recv, rank in machine.reach(new).items():
                if rank == self.rank:
                    sends.append(recv)
                else:
                    self._outgoing[rank].marks.append(recv)

    def _close_marking(self) -> None:
        if not self._is_marking or self._unacknowledged or any(each.marks for each in self._outgoing.values()):
            return
        self._is_marking = False
        if self._mark_parent is None:
            self._join(None)
        else:
            self._outgoing[self._mark_parent].acknowledged += 1

    def _receive_run(self, source: int, message: BackwardMessage) -> None:
        if message.asks:
            if self._takes_part:
                self._outgoing[source].done = True
            else:
                self._join(source)
        if self.phase is not BackwardPhase.RUNNING:
            # The sender had finished before this worker was asked. It sends this again.
            return
        if message.asks or message.done or message.gradients:  # Of the run itself, which comes after all marks
            self._known.add(source)
            if message.done:
                self._asked.discard(source)
        for send, gradients in message.gradients.items():
            self._resolve(send, gradients)

    def _join(self, parent: int | None) -> None:
        if self._machine is not None:
            self.phase = BackwardPhase.RUNNING
            self._takes_part, self._parent = True, parent
            self._waits = dict(self._machine.engage(self._marked if self._mode is Mode.SMART else None))

    def _resolve(self, send: int, gradients: Gradients | None) -> None:
        if self._machine is None or self._waits.pop(send, None) is None:
            return
        if gradients is None and self._mode is Mode.FAST:
            self.fail(self._machine.describe_unused(send, self.rank))
        else:
            self._machine.resolve(send, gradients)

    def _address_emitted(self) -> bool:
        """Address what the machine has emitted. Returns whether some of it was for this worker itself."""
        has_own = False
        while self._emitted:
            recv, rank, gradients = self._emitted.popleft()
            if rank == self.rank:
                has_own = True
                self._resolve(recv, gradients)
            else:
                self._to_run(rank).gradients[recv] = gradients
        return has_own

    def _ask_awaited(self) -> None:
        """Ask workers that are waited for and would not take part: they got no tensor in return."""
        for rank in set(self._waits.values()) - self._known - {self.rank}:
            self._to_run(rank)

    def _finish(self) -> None:
        if self._waits or self._asked or self._machine is None or not self._machine.finished:
            return
        if self._parent is not None:
            self._outgoing[self._parent].done = True
        self._end(BackwardPhase.FINISHED, None)

    def _answer_late(self, source: int) -> None:
        """Another worker asks this one, which has finished. Tell it of the recvs that were opened later."""
        message = self._outgoing[source]
        message.done = True
        message.gradients.update((recv, None) for recv, rank in self._late if rank == source)

    def _to_run(self, rank: int) -> BackwardMessage:
        """Return the message to a worker that has to take part."""
        message = self._outgoing[rank]
        if rank not in self._known:
            self._known.add(rank)
            self._asked.add(rank)
            message.asks = True
        return message

    def _end(self, phase: BackwardPhase, error: str | None) -> None:
        self.phase = phase
        self.error = error
        self._machine = None
        self._waits = {}
        self._emitted.clear()

    @property
    def _superior(self) -> int | None:
        """The worker that is told of an error; None at the root."""
        return self._parent if self._takes_part else self._origin

    def _report_to(self, rank: int) -> None:
        self._outgoing[rank].error, self._outgoing[rank].lost = self.error, self.lost_ranks

    def _abort(self, but: int | None) -> None:
        """Tell all workers that may know of this backward from here, except for one."""
        self._outgoing.clear()
        for rank in self._sent_to - {but}:
            self._outgoing[rank].abort = True
