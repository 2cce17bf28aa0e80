"""Which session of RPC a message is for: one worker may have ended its session, or not yet begun the one of the sender.

Messages for a session to come wait for it; a request for one that has ended here is refused, so that its caller does
not wait; other messages of the past are dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hvlike.transport.fabric import Fabric

TOPIC = 4
REQUEST, ANSWER, FAILURE, REFUSAL, NOTICE = range(5)
"""What a message is; these are counted, the following are not."""
QUESTION, STATE, DEPARTURE, REPORT, VERDICT = range(5, 10)
"""What do you do? This is what I do. I am gone. The last two: see termination.py."""

Receive = Callable[[int, int, Any, list[torch.Tensor]], None]
"""What an agent does with a message: sender, what it is, the rest of it, storages. In the loop."""


class Switchboard:
    """All RPC messages that reach this process over one fabric."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._session = 0
        self._receive: Receive | None = None
        self._waiting: list[tuple[int, tuple[Any, ...], list[torch.Tensor]]] = []
        fabric.channel.listen(TOPIC, self._deliver)

    def begin(self, session: int, receive: Receive) -> None:
        """Messages of `session` go to `receive` from now on, those that have waited at once. From any thread."""

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
        """Send (session, what, ...) to a worker. In the loop."""
        self._fabric.channel.send(rank, TOPIC, message, storages, kind="rpc")

    def _deliver(self, source: int, message: tuple[Any, ...], storages: list[torch.Tensor]) -> None:
        session, what, *rest = message
        if session > self._session:
            self._waiting.append((source, message, storages))
        elif session == self._session and self._receive is not None:
            self._receive(source, what, rest, storages)
        elif what == REQUEST:
            self.send(source, (session, REFUSAL, rest[0]), [])
