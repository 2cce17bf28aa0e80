"""The ledger of a rank: everything is numbered in one order, a name is in flight once, and threads are told apart."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from hvlike.collectives.ledger import MANY_THREADS, Ledger
from hvlike.collectives.places import place_of_caller
from hvlike.collectives.request import Request, Signature
from hvlike.errors import DuplicateNameError, ShutdownError

pytestmark = pytest.mark.pure


def request(name: str) -> Request:
    return Request(name, Signature("allreduce"), [torch.ones(1)], lambda request: None)


@contextmanager
def asking(ledger: Ledger) -> Iterator[threading.Thread]:
    """A thread that has asked for something, and lives."""
    asked, end = threading.Event(), threading.Event()

    def ask() -> None:
        ledger.notice(("allreduce", "x"), place_of_caller())
        asked.set()
        end.wait(20)

    thread = threading.Thread(target=ask)
    thread.start()
    assert asked.wait(20)
    try:
        yield thread
    finally:
        end.set()
        thread.join()


def test_requests_are_numbered_in_their_order() -> None:
    ledger, told = Ledger(3), []
    ledger.on_entry = told.append
    ledger.enter(request("a"), counted=False)
    ledger.enter(request("b"), counted=True)
    ledger.enter(request("c"), counted=False)
    assert ledger.entered == 2
    assert told == [1, 2]
    assert ledger.last is not None
    assert ledger.last[0] == ("allreduce", "c")


def test_a_name_is_in_flight_once_and_its_second_use_takes_no_number() -> None:
    ledger = Ledger(3)
    first = request("a")
    ledger.enter(first, counted=False)
    assert not ledger.may_begin(first.key)
    with pytest.raises(DuplicateNameError, match="'a' on rank 3"):
        ledger.enter(request("a"), counted=False)
    assert ledger.entered == 1
    assert ledger.leave(first.key) is first
    assert ledger.leave(first.key) is None
    assert ledger.may_begin(first.key)


def test_a_new_epoch_is_past_every_number() -> None:
    ledger = Ledger(0)
    for name in "abc":
        ledger.enter(request(name), counted=False)
    ledger.begin_epoch()
    first = ledger.entered
    ledger.begin_epoch()
    assert 3 < first < ledger.entered


def test_nothing_is_accepted_after_the_end() -> None:
    ledger, waiting = Ledger(0), request("a")
    ledger.enter(waiting, counted=False)
    assert ledger.close(ShutdownError("over")) == [waiting]
    assert not ledger.may_begin(("allreduce", "b"))
    with pytest.raises(ShutdownError, match="over"):
        ledger.enter(request("b"), counted=False)
    assert ledger.close(ShutdownError("over")) == []


def test_threads_that_have_ended_ask_for_nothing_more() -> None:
    ledger = Ledger(0)
    ledger.notice(("allreduce", "x"), place_of_caller())
    assert ledger.has_one_thread()
    with asking(ledger):
        assert not ledger.has_one_thread()
    assert ledger.has_one_thread()


def test_a_thread_with_the_number_of_one_that_has_ended_is_another() -> None:
    ledger = Ledger(0)
    ledger.notice(("allreduce", "x"), place_of_caller())
    numbers = set()
    for count in range(1, MANY_THREADS + 3):
        with asking(ledger) as thread:
            numbers.add(thread.ident)
            assert not ledger.has_one_thread(), f"thread {count} with number {thread.ident} is not known"
    if len(numbers) == count:
        pytest.skip("this system gives every thread a number of its own")
