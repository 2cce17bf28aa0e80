"""The RRefs of this worker in a session of RPC: the protocol of lifetime.py with a lock, and the agent to talk through.

Lock order: the session's lock is the innermost; nothing of the user runs under it, nothing is sent under it. It can be
taken twice by one thread, since the garbage collector may run a finaliser of the user's anywhere.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from hvlike.errors import RpcError
from hvlike.rpc.agent import Agent
from hvlike.rpc.rrefs.effects import ACCEPTED, DELETE, DROPPED, REGISTER, REGISTERED, Effects
from hvlike.rpc.rrefs.entry import Entry
from hvlike.rpc.rrefs.fork import Fork
from hvlike.rpc.rrefs.lifetime import Lifetime

R = TypeVar("R")

NO_AGENT = "Current RPC agent is not set! Did you initialize the RPC framework (e.g. by calling `rpc.init_rpc`)?"


class Session:
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

    def when_settled(self, entry: Entry, then: Callable[[], None]) -> None:
        """Call `then` when the value of `entry` is there or will never be: now, or in the thread that settles it."""
        if entry.settled:
            then()
        else:
            self.perform(self.lifetime.owned.when_settled, entry, then)

    def wait(self, entry: Entry, seconds: float | None = None) -> bool:
        """Block until `entry` is settled; False when the time is over before."""
        if not entry.settled:
            settled = threading.Event()
            self.when_settled(entry, settled.set)
            return settled.wait(seconds)
        return True

    def settle(self, entry: Entry, value: Any = None, failure: Any = None) -> None:
        """The value is there, or will never be; in the thread that has made it."""
        if failure is None:
            entry.marks = self.agent.devices.marks()
        self.perform(self.lifetime.owned.settle, entry, value, failure)

    def local(self, value: Any) -> Entry:
        """The entry of a value that is there; in no table before it is sent."""
        entry = Entry(self.lifetime.new_id())
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
    session: Session | None = None


def install(agent: Agent) -> Session:
    """Begin a session, before the agent takes messages."""
    session = _Process.session = Session(agent)
    session.listen()
    return session


def uninstall() -> None:
    """End the session."""
    session, _Process.session = _Process.session, None
    if session is not None:
        session.end()


def current() -> Session:
    """The running session. Raises: RuntimeError before init_rpc and after shutdown."""
    session = _Process.session
    if session is None:
        raise RpcError(NO_AGENT)
    return session


def running() -> Session | None:
    """The running session, if one does."""
    return _Process.session
