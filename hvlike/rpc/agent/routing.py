"""Where an incoming message belongs: to which session, and to which pending call.

A worker may have ended its session already, or not yet begun the session of the sender. Messages for a later session
wait for it; a request for a session that has ended here is refused, so that its caller does not wait; other messages of
old sessions are dropped.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

from hvlike.rpc.wire.message import Packed
from hvlike.transport.fabric import Fabric
from hvlike.transport.messages.topics import Topic

REQUEST, ANSWER, FAILURE, REFUSAL, NOTICE = range(5)
"""Message types of calls. Each is counted, for the detection of the session's end."""
STATUS_QUERY, STATUS, LEAVING, IDLE_REPORT, WAVE_RESULT = range(5, 10)
"""Message types of the shutdown, which are not counted; see shutdown.py."""

_UNUSED_DEADLINES = 1000

Receive = Callable[[int, int, Any, list[torch.Tensor]], None]
"""The agent's handler of a message: sender, message type, the rest of it, storages. Runs in the loop."""


class SessionRouter:
    """All RPC messages that reach this process over one fabric."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._session = 0
        self._receive: Receive | None = None
        self._waiting: list[tuple[int, tuple[Any, ...], list[torch.Tensor]]] = []
        fabric.channel.listen(Topic.RPC, self._deliver)

    def begin(self, session: int, receive: Receive) -> None:
        """Give messages of `session` to `receive` from now on, those that wait at once. From any thread."""

        def connect() -> None:
            self._session = session
            self._receive = receive
            waiting, self._waiting = self._waiting, []
            for message in waiting:
                self._deliver(*message)

        self._fabric.loop.perform(connect)

    def end(self) -> None:
        """The session is over on this worker. From any thread."""

        def disconnect() -> None:
            self._receive = None

        self._fabric.loop.perform(disconnect)

    def send(self, rank: int, message: tuple[Any, ...], storages: list[torch.Tensor]) -> None:
        """Send (session, message type, ...) to a worker. In the loop."""
        self._fabric.channel.send(rank, Topic.RPC, message, storages, kind="rpc")

    def _deliver(self, source: int, message: tuple[Any, ...], storages: list[torch.Tensor]) -> None:
        session, what, *rest = message
        if session == self._session and self._receive is not None:
            self._receive(source, what, rest, storages)
        elif session > self._session:
            self._waiting.append((source, message, storages))
        elif what == REQUEST:
            self.send(source, (session, REFUSAL, rest[0]), [])


@dataclass(eq=False, slots=True)
class Call:
    """A request on the worker that sends it, and later its reply."""

    rank: int
    """The worker that serves it."""
    kind: int
    timeout: float
    """Seconds; 0: none."""
    then: Callable[[Call], None] | None
    """Runs in a pool thread when the call has ended."""
    done: bool = False
    reply: Packed | None = None
    """The result, if the function returned."""
    failure: Any = None
    """The Description of the exception, if the function raised."""
    error: Exception | None = None
    """Why there is no reply: the time limit, a lost worker, a shutdown."""


class PendingCalls(dict[int, Call]):
    """The calls of one worker that have no reply yet, by number, and their deadlines.

    Any thread adds calls under the next of `numbers`; a thread that pops a call ends it. `limit`, `take_expired` and
    `next_deadline` run in the loop.
    """

    def __init__(self) -> None:
        super().__init__()
        self.numbers = count(1)
        self._deadlines: list[tuple[float, int]] = []

    def limit(self, number: int, deadline: float) -> None:
        """Let the call expire at `deadline`, in seconds of time.monotonic()."""
        heapq.heappush(self._deadlines, (deadline, number))
        if len(self._deadlines) > 2 * len(self) + _UNUSED_DEADLINES:
            # Answered calls leave their deadlines behind: thousands a second, each for a minute.
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self]
            heapq.heapify(self._deadlines)

    def take_all(self, ranks: set[int] | None = None) -> list[Call]:
        """Remove and return all calls, or those to `ranks`."""
        numbers = [number for number, call in list(self.items()) if ranks is None or call.rank in ranks]
        ended = [self.pop(number, None) for number in numbers]
        return [call for call in ended if call is not None]

    def take_expired(self, now: float) -> list[Call]:
        """Remove and return the calls whose deadline has passed at `now`."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now:
            call = self.pop(heapq.heappop(self._deadlines)[1], None)
            if call is not None:
                expired.append(call)
        return expired

    def next_deadline(self) -> float:
        """Return the earliest deadline of a call without a reply; infinity if there is none."""
        while self._deadlines and self._deadlines[0][1] not in self:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else math.inf

    def ranks(self) -> Counter[int]:
        """Return how many calls wait for each worker."""
        return Counter(call.rank for call in list(self.values()))
