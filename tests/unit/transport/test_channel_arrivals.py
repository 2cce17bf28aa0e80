"""Messages whose bytes come late or never, without MPI: those of the others go on arriving."""

import pickle
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from hvlike.transport.loop.coroutine import Wait
from hvlike.transport.messages.channel import HEADER, Channel
from hvlike.transport.messages.traffic import Traffic

TOPIC = 900
RECEIVER, VICTIM, OTHER = range(3)


class Status:
    """Of the message that was found last."""

    source, nbytes = -1, 0

    def Get_source(self) -> int:
        return self.source

    def Get_count(self, _: object) -> int:
        return self.nbytes


@dataclass
class Message:
    """One on its way."""

    source: int
    data: bytes
    is_whole: bool


class Network:
    """A communicator in which messages lie, of some only the beginning."""

    rank, size = RECEIVER, 3

    def __init__(self) -> None:
        self.messages: deque[Message] = deque()

    def Improbe(self, tag: int, status: Status) -> Any:
        if not self.messages:
            return None
        message = self.messages.popleft()
        status.source, status.nbytes = message.source, len(message.data)

        def irecv(buffer: list[Any]) -> Any:
            buffer[0].data[:] = message.data
            return SimpleNamespace(Test=lambda: message.is_whole)

        return SimpleNamespace(Irecv=irecv)


class Ranks:
    """A channel of the receiver, and what the other two ranks of its node send to it."""

    def __init__(self) -> None:
        self.network = Network()
        self.counters = memoryview(bytearray(9 * 8)).cast("Q")
        sources: list[Callable[[bool], Wait]] = []
        loop: Any = SimpleNamespace(
            add_source=lambda progress, _: sources.append(progress), perform=lambda action: action()
        )
        mpi = SimpleNamespace(Status=Status, BYTE=None)
        bells: Any = dict.fromkeys(range(3))
        self.channel = Channel(mpi, self.network, loop, bells, self.counters, Traffic(), SimpleNamespace())  # type: ignore[arg-type]
        (self.progress,) = sources
        self.seen: list[int] = []
        self.texts: list[str] = []
        self.channel.listen(TOPIC, lambda source, text, _: (self.seen.append(source), self.texts.append(text)))  # type: ignore[func-returns-value]

    def send(
        self, source: int, *, is_whole: bool = True, leaves: bool = True, is_counted: bool = True, text: str = ""
    ) -> Message:
        """leaves: MPI has it. is_counted: the sender has added it to its messages for the receiver."""
        body = pickle.dumps(text)
        message = Message(source, HEADER.pack(TOPIC << 2, 0, len(body)) + body, is_whole)
        if leaves:
            self.network.messages.append(message)
        self.counters[source * 3 + RECEIVER] += is_counted
        return message

    def receive(self) -> list[int]:
        """The senders of the messages that arrive after the bell has rung once."""
        self.seen.clear()
        while self.progress(True) is Wait.AGAIN:
            pass
        return list(self.seen)


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


def test_half_a_message_does_not_hold_up_those_of_others(ranks: Ranks) -> None:
    """A rank that was cut off in the middle of one once hid the heartbeats of the third host, and this one ended."""
    ranks.send(VICTIM, is_whole=False)
    ranks.send(OTHER)
    assert ranks.receive() == [OTHER]


def test_messages_of_a_rank_stay_in_order(ranks: Ranks) -> None:
    first, second = (ranks.send(VICTIM, is_whole=False, text=text) for text in ("first", "second"))
    ranks.send(VICTIM, text="third")
    second.is_whole = True
    assert ranks.receive() == []
    first.is_whole = True
    assert ranks.receive() == [VICTIM] * 3
    assert ranks.texts == ["first", "second", "third"]


def test_the_rest_of_what_a_lost_rank_has_begun_is_not_waited_for(ranks: Ranks) -> None:
    ranks.send(VICTIM, is_whole=False)
    assert ranks.receive() == []
    ranks.channel.lose(VICTIM)
    ranks.send(OTHER)
    assert ranks.receive() == [OTHER]
    assert ranks.progress(False) is Wait.NOTIFY
    assert ranks.channel.quiet


def test_half_a_message_that_is_found_after_the_loss_does_not_either(ranks: Ranks) -> None:
    ranks.channel.lose(VICTIM)
    ranks.send(VICTIM, is_whole=False)
    ranks.send(OTHER)
    assert ranks.receive() == [OTHER]


def test_a_message_that_its_sender_could_not_count_any_more_hides_none_of_the_others(ranks: Ranks) -> None:
    ranks.send(VICTIM, is_counted=False)
    ranks.send(OTHER)
    assert ranks.receive() == [VICTIM, OTHER]
    ranks.channel.lose(VICTIM)
    ranks.send(OTHER)
    assert ranks.receive() == [OTHER]


def test_a_message_that_was_counted_and_never_left_is_not_waited_for(ranks: Ranks) -> None:
    ranks.send(VICTIM, leaves=False)
    ranks.receive()
    assert not ranks.channel.quiet
    ranks.channel.lose(VICTIM)
    assert ranks.receive() == []
    assert ranks.channel.quiet
    assert ranks.progress(False) is Wait.NOTIFY
