"""Messages: any object, any tensors, any size, in order, to oneself too."""

from collections.abc import Iterator
from pickle import PickleBuffer
from types import ModuleType
from typing import Any

import pytest
import torch

from hvlike.collectives.session.context import current
from hvlike.transport.fabric import Fabric
from hvlike.transport.messages.channel import INLINE_BYTES, Mailbox

pytestmark = [pytest.mark.differs_by_ranks(2, 4), pytest.mark.rests_on_mpi]

TOPIC = 900


class Inbox:
    """Messages received by this rank."""

    def __init__(self, fabric: Fabric, topic: int) -> None:
        self.fabric = fabric
        self.topic = topic
        self.messages: list[tuple[int, Any, list[torch.Tensor]]] = []
        fabric.channel.listen(topic, lambda rank, value, tensors: self.messages.append((rank, value, tensors)))

    def send(self, rank: int, value: Any, tensors: list[torch.Tensor] | None = None) -> None:
        self.fabric.channel.send_soon(rank, self.topic, value, tensors or [])

    def receive(self, count: int) -> list[tuple[int, Any, list[torch.Tensor]]]:
        assert self.fabric.loop.wait(lambda: len(self.messages) >= count, 30.0), f"{len(self.messages)} of {count}"
        taken, self.messages = self.messages[:count], self.messages[count:]
        return taken


@pytest.fixture
def inbox(hvd: ModuleType) -> Iterator[Inbox]:
    made = Inbox(current().fabric, TOPIC)
    hvd.barrier()  # nobody sends before all listen
    yield made
    hvd.barrier()
    assert not made.messages


def neighbours(hvd: ModuleType) -> tuple[int, int]:
    return (hvd.rank() + 1) % hvd.size(), (hvd.rank() - 1) % hvd.size()


@pytest.mark.parametrize("nbytes", [0, 10, INLINE_BYTES, INLINE_BYTES + 1, 70_000, 5_000_000])
def test_tensors_arrive_as_they_were_sent(hvd: ModuleType, inbox: Inbox, nbytes: int) -> None:
    right, left = neighbours(hvd)
    tensor = (torch.arange(nbytes) % 251 + hvd.rank()).to(torch.uint8)
    half = torch.full((nbytes // 8, 2), float(hvd.rank()), dtype=torch.bfloat16)
    inbox.send(right, {"rank": hvd.rank()}, [tensor, half])
    ((source, value, tensors),) = inbox.receive(1)
    assert (source, value) == (left, {"rank": left})
    assert torch.equal(tensors[0], (torch.arange(nbytes) % 251 + left).to(torch.uint8))
    assert torch.equal(tensors[1], torch.full((nbytes // 8, 2), float(left), dtype=torch.bfloat16))


@pytest.mark.parametrize("nbytes", [0, INLINE_BYTES, 200_000])
@pytest.mark.parametrize("lengths", [[5], [1 << 16, 0, 3]])
def test_buffers_in_a_value_are_views_of_what_has_come(
    hvd: ModuleType, inbox: Inbox, nbytes: int, lengths: list[int]
) -> None:
    right, left = neighbours(hvd)
    if right == hvd.rank():
        pytest.skip("a rank gets the very objects that it sends to itself")
    contents = [bytearray([hvd.rank()]) * length for length in lengths]
    inbox.send(right, ("before", [PickleBuffer(each) for each in contents], "after"), [torch.ones(nbytes // 4)])
    ((_, (before, buffers, after), tensors),) = inbox.receive(1)
    assert (before, after) == ("before", "after")
    assert [bytes(each) for each in buffers] == [bytes([left]) * length for length in lengths]
    assert not any(each.readonly for each in buffers)
    assert torch.equal(tensors[0], torch.ones(nbytes // 4))


def test_messages_of_one_sender_arrive_in_order_also_large_pickles(hvd: ModuleType, inbox: Inbox) -> None:
    right, left = neighbours(hvd)
    for number in range(60):
        inbox.send(right, (number, b"x" * (300_000 if number % 7 == 0 else 10)))
    received = inbox.receive(60)
    assert [value[0] for _, value, _ in received] == list(range(60))
    assert {source for source, _, _ in received} == {left}


def test_everybody_can_send_to_everybody_at_once(hvd: ModuleType, inbox: Inbox) -> None:
    for number in range(20):
        for rank in range(hvd.size()):
            inbox.send(rank, number, [torch.full((number * 500,), number)])
    received = inbox.receive(20 * hvd.size())
    assert sorted((source, value) for source, value, _ in received) == [
        (rank, number) for rank in range(hvd.size()) for number in range(20)
    ]
    assert all(bool((tensors[0] == value).all()) for _, value, tensors in received)


def test_a_routine_can_wait_for_a_letter_by_sender_and_key(hvd: ModuleType, inbox: Inbox) -> None:
    fabric = inbox.fabric
    mailbox = Mailbox(fabric.channel, TOPIC + 1)
    hvd.barrier()
    right, left = neighbours(hvd)

    def exchange() -> Any:
        mailbox.send(right, "second", 2)
        mailbox.send(right, "first", hvd.rank())
        first = yield from mailbox.receive(left, "first")
        second = yield from mailbox.receive(left, "second")
        return first, second

    task = fabric.loop.start(exchange(), wake=False)
    assert fabric.loop.wait(lambda: task.done, 30.0)
    assert task.result == (left, 2)
