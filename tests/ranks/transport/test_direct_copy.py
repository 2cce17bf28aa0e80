"""Payloads that both ranks copy: all bytes arrive, whoever does how much of it, and whatever fails."""

import errno
import os
import random
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvlike.collectives.session.context import current
from hvlike.transport.loop.coroutine import Coroutine, Wait
from hvlike.transport.memory import process_memory
from hvlike.transport.memory.doorbell import Fence
from hvlike.transport.messages.direct_copy import LEAST_BYTES, SLOT_WORDS, DirectCopies

pytestmark = [pytest.mark.differs_by_ranks(2, 4), pytest.mark.rests_on_mpi]

TOPIC = 901


class Pair:
    """Two ranks in this one process, whose coroutines a test advances in the order it likes."""

    def __init__(self) -> None:
        table = np.zeros(2 * SLOT_WORDS, np.uint64).data.cast("B").cast("Q")
        self.bells: Any = {rank: SimpleNamespace(process=os.getpid(), ring=lambda: None) for rank in range(2)}
        self.sender, self.receiver = (DirectCopies(table, {0: 0, 1: 1}, self.bells, rank, Fence()) for rank in range(2))
        self.sender.enabled = True
        self.by_mpi: list[str] = []

    def begin(self, sent: torch.Tensor, received: torch.Tensor) -> tuple[Coroutine[None], Coroutine[None]]:
        """The coroutines of the sender and of the receiver."""
        note = self.sender.offer(1, [sent])
        assert note is not None
        self.sender.take()
        return (
            self.sender.send(1, sent.numpy(), lambda: self._by_mpi("sent")),
            self.receiver.receive(0, note[1], received.numpy(), lambda: self._by_mpi("received")),
        )

    def _by_mpi(self, what: str) -> Coroutine[None]:
        self.by_mpi.append(what)
        yield Wait.POLL


def run(coroutines: list[Coroutine[None]], choose: Callable[[int], int]) -> None:
    """Advance them until all have ended."""
    for _ in range(10_000):
        index = choose(len(coroutines))
        if next(coroutines[index], None) is None:
            del coroutines[index]
            if not coroutines:
                return
    raise AssertionError("they wait for each other")


@pytest.mark.pure
@settings(deadline=None, max_examples=30)
@given(length=st.integers(LEAST_BYTES, 6 * LEAST_BYTES), seed=st.integers(0, 2**20), odds=st.integers(1, 9))
def test_all_bytes_arrive_whoever_copies_how_much(length: int, seed: int, odds: int) -> None:
    pair, dice = Pair(), random.Random(seed)
    sent = torch.randint(0, 255, (length,), dtype=torch.uint8)
    for _ in range(2):  # the slot is used again
        received = torch.zeros_like(sent)
        both = list(pair.begin(sent, received))
        run(both, lambda count: 0 if count == 1 or dice.randrange(10) < odds else 1)
        assert torch.equal(received, sent)
    assert pair.by_mpi == []


@pytest.mark.pure
@settings(deadline=None, max_examples=30)
@given(good=st.integers(0, 4), failing=st.sampled_from(["read", "write"]), seed=st.integers(0, 2**20))
def test_where_the_system_refuses_the_receiver_has_it_sent_by_mpi(good: int, failing: str, seed: int) -> None:
    pair, dice = Pair(), random.Random(seed)
    sent = torch.randint(0, 255, (5 * LEAST_BYTES,), dtype=torch.uint8)
    received = torch.zeros_like(sent)
    real = getattr(process_memory, failing)
    calls = []

    def refuse(*args: int) -> None:
        calls.append(args)
        if len(calls) > good:
            raise OSError(errno.EPERM, "forbidden")
        real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_memory, failing, refuse)
        run(list(pair.begin(sent, received)), dice.randrange)
    if pair.by_mpi:
        assert (sorted(pair.by_mpi), failing) == (["received", "sent"], "read")
    else:
        assert torch.equal(received, sent)
    assert pair.sender.offer(1, [sent]) is not None


@pytest.mark.pure
@pytest.mark.parametrize("steps", range(1, 5))
def test_a_receiver_that_gives_up_is_written_to_no_more(steps: int) -> None:
    pair = Pair()
    sent = torch.full((3 * LEAST_BYTES,), 7, dtype=torch.uint8)
    received = torch.zeros_like(sent)
    send, receive = pair.begin(sent, received)
    for _ in range(steps):
        next(receive, None)
        if steps % 2:
            next(send, None)
    receive.close()
    received.zero_()
    run([send], lambda count: 0)
    assert not received.any()


@pytest.mark.pure
def test_short_payloads_and_a_second_one_at_a_time_go_by_mpi() -> None:
    pair = Pair()
    short, long = torch.zeros(LEAST_BYTES - 1, dtype=torch.uint8), torch.zeros(LEAST_BYTES, dtype=torch.uint8)
    assert pair.sender.offer(1, [short]) is None
    assert pair.sender.offer(1, [short, long, short]) == (1, long.data_ptr())
    assert pair.sender.offer(2, [long]) is None, "a rank of another node"
    pair.sender.take()
    assert pair.sender.offer(1, [long]) is None


@pytest.mark.pure
def test_the_memory_of_a_process_that_is_not_the_rank_is_not_used() -> None:
    pair = Pair()
    assert pair.sender.reaches(1)
    pair.receiver.probe[0] += 1
    assert not pair.sender.reaches(1)
    pair.bells[1].process = 2**22 + 1
    assert not pair.sender.reaches(1)


@pytest.fixture
def received(hvd: ModuleType) -> Iterator[list[tuple[int, list[torch.Tensor]]]]:
    """Messages of this file's topic."""
    messages: list[tuple[int, list[torch.Tensor]]] = []
    current().fabric.channel.listen(TOPIC, lambda rank, value, tensors: messages.append((value, tensors)))
    hvd.barrier()  # nobody sends before all listen
    yield messages
    hvd.barrier()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("way", ["both copy", "by MPI", "the receiver cannot read", "the sender cannot write"])
def test_messages_arrive_on_every_way(
    hvd: ModuleType, received: list[Any], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    fabric = current().fabric

    def refuse(*args: int) -> None:
        raise OSError(errno.EPERM, "forbidden")

    if way == "by MPI":
        monkeypatch.setattr(fabric.channel.direct, "enabled", False)
    elif way != "both copy":
        monkeypatch.setattr(process_memory, "read" if "read" in way else "write", refuse)
    hvd.barrier()
    right, left = (hvd.rank() + 1) % hvd.size(), (hvd.rank() - 1) % hvd.size()
    shapes = [(3,), (LEAST_BYTES // 4 + 1,), (1000, 999), (7,)]
    for number in range(6):
        tensors = [torch.full(shape, float(hvd.rank() + number)) for shape in shapes]
        fabric.channel.send_soon(right, TOPIC, number, tensors)
    assert fabric.loop.wait(lambda: len(received) == 6, 60.0)
    assert sorted(value for value, _ in received) == list(range(6))
    for value, tensors in received:
        assert [tuple(tensor.shape) for tensor in tensors] == shapes
        assert all(bool((tensor == left + value).all()) for tensor in tensors)
    hvd.barrier()
