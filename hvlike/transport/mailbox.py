"""Messages that a routine waits for, by sender and key."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Any

import torch

from hvlike.transport.channel import Channel
from hvlike.transport.routine import Routine, Wait


class Mailbox:
    """Keeps the messages of one topic until a routine asks for them."""

    def __init__(self, channel: Channel, topic: int) -> None:
        self._channel = channel
        self._topic = topic
        self._letters: dict[tuple[int, Hashable], deque[Any]] = {}
        channel.listen(topic, self._deliver)

    def send(self, rank: int, key: Hashable, value: Any) -> None:
        """Send `value` to `rank`, where a routine receives it under `key`. From inside the loop."""
        self._channel.send(rank, self._topic, (key, value), kind="letter")

    def receive(self, rank: int, key: Hashable) -> Routine[Any]:
        """Wait for the next value that `rank` sends under `key`."""
        while not (letters := self._letters.get((rank, key))):
            yield Wait.BELL
        value = letters.popleft()
        if not letters:
            del self._letters[(rank, key)]
        return value

    def _deliver(self, rank: int, letter: tuple[Hashable, Any], tensors: list[torch.Tensor]) -> None:
        key, value = letter
        self._letters.setdefault((rank, key), deque()).append(value)
