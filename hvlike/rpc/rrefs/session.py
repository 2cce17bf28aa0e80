"""The RRefs of this worker in an RPC session: the lifetime protocol with a lock, and the agent to send through.

Lock order: the session's lock is the innermost; no user code runs and no message is sent under it. One thread can take
it twice, because the garbage collector may run a user's finalizer anywhere.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from hvlike.errors import RpcError
from hvlike.rpc.agent.agent import Agent
from hvlike.rpc.rrefs.lifetime import Lifetime
from hvlike.rpc.rrefs.records import ACCEPTED, DELETE, DROPPED, REGISTER, REGISTERED, Effects, Fork, OwnedValue

if TYPE_CHECKING:
    from hvlike.rpc.rrefs.rref import RRef


R = TypeVar("R")

NO_AGENT = "Current RPC agent is not set! Did you initialize the RPC framework (e.g. by calling `rpc.init_rpc`)?"


class RRefSession:
    """Takes the events of RRefs on this worker and carries out what follows from them. From any thread."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.rank = agent.rank
        self.lifetime = Lifetime(agent.rank)
        self.is_over = False
        """True from shutdown on: RRefs of this session cannot be used any more."""
        self.lock = threading.RLock()

    def perform(self, event: Callable[..., R], *args: Any) -> R:
        """Let the protocol take an event. Not in the loop."""
        with self.lock:
            result = event(*args)
            effects = self.lifetime.take_effects()
        self._tell(effects)
        for start in effects.starts:
            self.agent.submit(start, limited=True)
        for answer in effects.answers:
            answer()
        return result

    def perform_in_loop(self, event: Callable[..., object], *args: Any) -> None:
        """The same where nothing may block and no code of the user may run."""
        with self.lock:
            event(*args)
            effects = self.lifetime.take_effects()
        self._tell(effects)
        for start in effects.starts:
            self.agent.submit(start, limited=True)
        for answer in effects.answers:
            self.agent.submit(answer)
        if effects.freed:
            self.agent.submit(effects.freed.clear)

    def listen(self) -> None:
        """Take notices from the other workers."""
        for kind in (REGISTER, REGISTERED, ACCEPTED, DELETE, DROPPED):
            self.agent.hear(kind, partial(self._hear, kind))

    def finalise(self, fork: Fork) -> None:
        """The RRef object of this fork is gone. Safe in a finaliser: only puts it down."""
        if not self.is_over:
            self.agent.notify(self.rank, DROPPED, (tuple(fork.id),))

    def when_settled(self, entry: OwnedValue, then: Callable[[], None]) -> None:
        """Call `then` when the value of `entry` is there or will never be: now, or in the thread that settles it."""
        if entry.settled:
            then()
        else:
            self.perform(self.lifetime.owned.when_settled, entry, then)

    def wait(self, entry: OwnedValue, seconds: float | None = None) -> bool:
        """Block until `entry` is settled; False when the time is over before."""
        if not entry.settled:
            settled = threading.Event()
            self.when_settled(entry, settled.set)
            return settled.wait(seconds)
        return True

    def settle(self, entry: OwnedValue, value: Any = None, failure: Any = None) -> None:
        """The value is there, or will never be; in the thread that has made it."""
        if failure is None:
            entry.marks = self.agent.devices.marks()
        self.perform(self.lifetime.owned.settle, entry, value, failure)

    def local(self, value: Any) -> OwnedValue:
        """The entry of a value that is there; in no table before it is sent."""
        entry = OwnedValue(self.lifetime.new_id())
        entry.created = entry.settled = True
        entry.value = value
        entry.marks = self.agent.devices.marks()
        return entry

    def end(self) -> None:
        """RRefs of this session raise from now on, values that are not there will never be."""
        self.is_over = True
        failure = RpcError(f"RPC has been shut down on {self.agent.me.name} before the value of this RRef was there.")
        for entry in list(self.lifetime.owned.entries.values()):
            self.perform(self.lifetime.owned.settle, entry, None, failure)
        self.lifetime.owned.entries.clear()
        self.lifetime.used.forks.clear()

    def _hear(self, kind: int, source: int, value: tuple[Any, ...]) -> None:
        self.perform_in_loop(self.lifetime.hear, kind, source, value)

    def _tell(self, effects: Effects) -> None:
        for notice in effects.notices:
            self.agent.notify(*notice)


class _Process:
    session: RRefSession | None = None


def begin_session(agent: Agent) -> RRefSession:
    """Begin a session, before the agent takes messages."""
    session = _Process.session = RRefSession(agent)
    session.listen()
    return session


def end_session() -> None:
    """End the session."""
    session, _Process.session = _Process.session, None
    if session is not None:
        session.end()


def current_session() -> RRefSession:
    """The running session. Raises: RuntimeError before init_rpc and after shutdown."""
    session = _Process.session
    if session is None:
        raise RpcError(NO_AGENT)
    return session


def running_session() -> RRefSession | None:
    """The running session, if one does."""
    return _Process.session


def when_confirmed(rrefs: Sequence[RRef[Any]], then: Callable[[], None]) -> None:
    """Call `then` when all RRefs are confirmed by their owners: now if they are, else in a thread of its own time.

    rrefs: those met in one message. Does not block, holds no thread.
    """
    forks = [rref.held for rref in rrefs if isinstance(rref.held, Fork)]
    if all(fork.confirmed for fork in forks):
        then()
        return
    session = current_session()
    if session.perform(session.lifetime.used.when_confirmed, forks, then):
        then()
