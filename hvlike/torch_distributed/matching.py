"""Which receive gets which message: in the order of the calls, for each sender and tag.

    receives  wait, in the order of their calls, for a source or for any
    messages  wait, in the order in which they came

A receive takes the earliest message that fits, a message the earliest receive that fits: never is there one of each
that fit each other. As with MPI, what one rank sends to another by one tag is received in that order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

M = TypeVar("M")
R = TypeVar("R")


class Matching(Generic[M, R]):
    """The receives and messages of one rank in one group. Sources are positions in the group."""

    def __init__(self) -> None:
        self._receives: dict[int, list[tuple[int | None, R]]] = {}  # By tag
        self._messages: dict[int, list[tuple[int, M]]] = {}

    def receive(self, source: int | None, tag: int, receive: R) -> tuple[int, M] | None:
        """The message for a new receive, with its source; without one the receive waits. source: None: any."""
        messages = self._messages.get(tag)
        if messages is not None:
            for place, (sender, _) in enumerate(messages):
                if source is None or source == sender:
                    return _take(self._messages, tag, place)
        self._receives.setdefault(tag, []).append((source, receive))
        return None

    def arrive(self, source: int, tag: int, message: M) -> R | None:
        """The receive for a message that has come; without one the message waits."""
        receives = self._receives.get(tag)
        if receives is not None:
            for place, (wanted, _) in enumerate(receives):
                if wanted is None or wanted == source:
                    return _take(self._receives, tag, place)[1]
        self._messages.setdefault(tag, []).append((source, message))
        return None

    def take_receives(self, chosen: Callable[[int | None, R], bool]) -> list[R]:
        """Take the receives that wait and are chosen, by the source they wait for (None: any)."""
        taken = [each for receives in self._receives.values() for source, each in receives if chosen(source, each)]
        left = {tag: [each for each in receives if not chosen(*each)] for tag, receives in self._receives.items()}
        self._receives = {tag: receives for tag, receives in left.items() if receives}
        return taken

    def take_messages(self) -> list[tuple[int, M]]:
        """Take all messages that wait."""
        taken = [each for messages in self._messages.values() for each in messages]
        self._messages.clear()
        return taken


T = TypeVar("T")


def _take(table: dict[int, list[T]], tag: int, place: int) -> T:
    entries = table[tag]
    taken = entries.pop(place)
    if not entries:
        del table[tag]
    return taken
