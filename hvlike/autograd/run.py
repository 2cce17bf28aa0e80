"""One backward on one worker: its events, and the thread that takes them.

Events wait in a queue. On the worker where backward() was called its own thread takes them, and drives the loop while
there are none; elsewhere a thread of RPC comes for each burst. Nothing of it waits for other workers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from torch import Tensor

from hvlike.autograd.distributed_context import DistributedContext, Recv
from hvlike.autograd.letter import Gradients, Letter
from hvlike.autograd.local_machine import LocalMachine, Roots
from hvlike.autograd.messages import LETTER, Heading, Wire, decode, encode
from hvlike.autograd.protocol import Part, State
from hvlike.autograd.timeline import Observed
from hvlike.rpc.agent import Agent

logger = logging.getLogger("hvlike")

Event = Callable[[], None]


class Keeper(Protocol):
    """What remembers the runs of this worker."""

    agent: Agent

    def forget(self, run: Run) -> None:
        """Nothing more comes of it. From any thread."""

    def is_live(self, context: DistributedContext) -> bool:
        """Whether the context has not been released."""


class Run:
    """From the first letter, or the call of backward(), on; what it was is remembered until the root has begun anew."""

    def __init__(self, keeper: Keeper, context: DistributedContext, heading: Heading, roots: Roots) -> None:
        """roots: empty where it was not begun."""
        self.heading = heading
        self.context = context
        self.cause: BaseException | None = None
        """At the root: what was raised on this worker, where that was the end of it."""
        self._keeper = keeper
        self._agent = agent = keeper.agent
        recorder = agent.fabric.recorder
        self._observed = Observed(recorder, heading) if recorder.on else None
        ran = self._observed.ran if self._observed is not None else None
        machine = LocalMachine(context, self, heading, roots, self._emit, agent.rank, ran)
        self._machine: LocalMachine | None = machine
        """None when it is over: it holds a part of the graph."""
        self.part = Part(agent.rank, heading.mode, machine)
        self._events: deque[Event] = deque()
        self._lock = threading.Lock()
        self._is_root = False
        self._is_taken = False
        """A thread takes the events, or will."""

    @property
    def is_over(self) -> bool:
        """It has ended on this worker."""
        return self.part.state is State.FINISHED or self.part.state is State.FAILED

    # -- events -------------------------------------------------------------------------------

    def hear(self, source: int, wire: Wire, storages: list[Tensor]) -> None:
        """A letter has come. In the loop."""
        self._put(partial(self._open, source, wire, storages))

    def lost(self, rank: int, error: str) -> None:
        """A worker is gone. In the loop."""
        self._put(partial(self.part.lost, rank, error))

    def recorded(self, recv: Recv) -> None:
        """A message was opened after the run had engaged. From any thread, like the following."""
        self._put(partial(self.part.recorded, recv.message, recv.rank), nudge=True)

    def withdrawn(self, message: int) -> None:
        """A message of this worker was dropped unopened."""
        self._put(partial(self.part.withdrawn, message), nudge=True)

    def released(self) -> None:
        """The context is gone."""
        if not self.is_over:
            self.fail(f"Could not find autograd context with id: {self.heading.context}: it was released meanwhile")
        self._keeper.forget(self)

    def fail(self, error: str) -> None:
        """Something outside of the backward ends it."""
        self._put(partial(self.part.fail, error), nudge=True)

    # -- in the thread of backward() --------------------------------------------------------------

    def complete(self, seconds: float | None) -> None:
        """Be the root: begin, and block until it has ended, well or badly. seconds: None for no limit."""
        deadline = None if seconds is None else time.monotonic() + seconds
        self._is_root = self._is_taken = True
        self._events.append(self.part.begin)
        try:
            self._turn()
            while not self.is_over:
                remaining = None if deadline is None else deadline - time.monotonic()
                if not self._agent.wait_until(lambda: bool(self._events), remaining):
                    self._events.append(partial(self.part.fail, self._overdue(seconds)))
                self._turn()
        except BaseException as error:
            self._events.append(partial(self.part.fail, repr(error)))
            self._turn()
            raise
        finally:
            self._keeper.forget(self)

    def _overdue(self, seconds: float | None) -> str:
        names = ", ".join(f"{self._agent.workers[rank].name} (rank {rank})" for rank in self.part.open)
        return (
            f"RPC ran for more than set timeout ({1000 * (seconds or 0.0):.0f} ms): this backward has had no answer "
            f"from {names or 'itself'}, or from a worker that is waited for there. The limit is that of RPC "
            "(rpc_timeout of init_rpc)."
        )

    # -- in whichever thread takes the events ----------------------------------------------------

    def _put(self, event: Event, *, nudge: bool = False) -> None:
        with self._lock:
            self._events.append(event)
            if self._is_taken:
                if nudge and self._is_root:
                    self._agent.fabric.loop.post(_nothing)
                return
            self._is_taken = True
        self._agent.submit(self._take_all)

    def _take_all(self) -> None:
        while True:
            self._turn()
            with self._lock:
                if not self._events:
                    self._is_taken = False
                    return

    def _turn(self) -> None:
        """Take all events that are there, run what can run then, and send what follows."""
        with self.context.lock:
            self._do(self._take_events)
            machine = self._machine
            if machine is not None and machine.is_unreduced and not self.is_over:
                # That waits for other ranks; what they may wait for has been sent.
                self._do(machine.reduce)
            if self.is_over and machine is not None:
                machine.let_go()
                self._machine = None
        if self._observed is not None and self.is_over:
            self._observed.ended(self.part.error)
            self._observed = None
        if self.part.state is State.FAILED and not self._keeper.is_live(self.context):
            self._keeper.forget(self)

    def _take_events(self) -> None:
        while self._events:
            self._events.popleft()()

    def _do(self, work: Callable[[], None]) -> None:
        """Do it, and what can be done then; send what follows."""
        try:
            work()
            self.part.advance()
        except BaseException as error:
            self._fail_by(error)
        letters = self.part.take_letters()
        while letters:
            self._send(letters)
            letters = self._letters_about_lost(letters)

    def _fail_by(self, error: BaseException) -> None:
        text = str(error) or repr(error)
        if self._is_root:
            self.cause = error
        else:
            logger.debug("rank %d: an error in a backward", self._agent.rank, exc_info=error)
        self.part.fail(text)

    def _send(self, letters: dict[int, Letter]) -> None:
        # Who is about to wait, or to listen again, sends them without waking anybody.
        now = self.is_over if self._is_root else bool(self._events)
        for rank, letter in letters.items():
            if self._observed is not None:
                self._observed.letter(letter, to=rank)
            wire, storages = encode(self.heading, letter, rank)
            self._agent.post(rank, LETTER, wire, storages, now=now)

    def _letters_about_lost(self, written: dict[int, Letter]) -> dict[int, Letter]:
        """What is to be sent because some of these letters have not gone out: their receivers are gone."""
        gone = self._agent.lost
        for rank in gone.keys() & written.keys() if gone else ():
            self.part.lost(rank, gone[rank])
        return self.part.take_letters()

    def _open(self, source: int, wire: Wire, storages: list[Tensor]) -> None:
        letter = decode(wire, storages, source)
        if self._observed is not None:
            self._observed.letter(letter, source=source)
        self.part.hear(source, letter)

    def _emit(self, message: int, rank: int, gradients: Gradients | None) -> None:
        self.part.emit(message, rank, gradients)


def _nothing() -> None:
    """To have the loop turn once."""
