"""The tensor queue of a rank: one order, a name in flight once, threads told apart; names; places of calls."""

import _thread
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from hvlike.collectives.controller.tensor_queue import MANY_THREADS, AutomaticNames, TensorQueue
from hvlike.collectives.requests.request import CallSite, Request, RequestSpec, find_call_site
from hvlike.errors import DuplicateNameError, ShutdownError
from hvlike.system.system import system


def request(name: str) -> Request:
    return Request(name, RequestSpec("allreduce"), [torch.ones(1)], lambda request: None)


@contextmanager
def asking(tensor_queue: TensorQueue) -> Iterator[threading.Thread]:
    """A daemon that has asked for something, and lives."""
    asked, end = threading.Event(), threading.Event()

    def ask() -> None:
        tensor_queue.notice(("allreduce", "x"), find_call_site())
        asked.set()
        end.wait(20)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    assert asked.wait(20)
    try:
        yield thread
    finally:
        end.set()
        thread.join()


def test_requests_are_numbered_in_their_order() -> None:
    tensor_queue, word = TensorQueue(3), memoryview(bytearray(8)).cast("q")
    tensor_queue.board = (word, [])
    tensor_queue.enter(request("a"), counted=False)
    tensor_queue.enter(request("b"), counted=True)
    tensor_queue.enter(request("c"), counted=False)
    assert tensor_queue.entered == 2
    assert word[0] == 2
    assert tensor_queue.last is not None
    assert tensor_queue.last[0] == ("allreduce", "c")


def test_a_name_is_in_flight_once_and_its_second_use_takes_no_number() -> None:
    tensor_queue = TensorQueue(3)
    first = request("a")
    tensor_queue.enter(first, counted=False)
    assert not tensor_queue.may_begin(first.key)
    with pytest.raises(DuplicateNameError, match="'a' on rank 3"):
        tensor_queue.enter(request("a"), counted=False)
    assert tensor_queue.entered == 1
    assert tensor_queue.leave(first.key) is first
    assert tensor_queue.leave(first.key) is None
    assert tensor_queue.may_begin(first.key)


def test_a_new_epoch_is_past_every_number() -> None:
    tensor_queue = TensorQueue(0)
    for name in "abc":
        tensor_queue.enter(request(name), counted=False)
    tensor_queue.begin_epoch()
    first = tensor_queue.entered
    tensor_queue.begin_epoch()
    assert 3 < first < tensor_queue.entered


def test_what_the_others_have_not_asked_for_counts_in_the_new_epoch() -> None:
    early, late = TensorQueue(0), TensorQueue(1)
    for name in ("decided", "in flight"):
        early.enter(request(name), counted=False)
    late.enter(request("decided"), counted=False)
    for tensor_queue in (early, late):
        tensor_queue.begin_epoch([request("decided").key])
    late.enter(request("in flight"), counted=False)
    assert early.entered == late.entered


def test_nothing_is_accepted_after_the_end() -> None:
    tensor_queue, waiting = TensorQueue(0), request("a")
    tensor_queue.enter(waiting, counted=False)
    assert tensor_queue.close(ShutdownError("over")) == [waiting]
    assert not tensor_queue.may_begin(("allreduce", "b"))
    with pytest.raises(ShutdownError, match="over"):
        tensor_queue.enter(request("b"), counted=False)
    assert tensor_queue.close(ShutdownError("over")) == []


def test_threads_that_have_ended_ask_for_nothing_more() -> None:
    tensor_queue = TensorQueue(0)
    tensor_queue.notice(("allreduce", "x"), find_call_site())
    assert tensor_queue.has_one_thread()
    with asking(tensor_queue):
        assert not tensor_queue.has_one_thread()
    assert tensor_queue.has_one_thread()


@pytest.mark.parametrize("kind", ["thread", "daemon", "timer"])
def test_a_thread_of_the_program_may_ask_for_something_yet(kind: str) -> None:
    tensor_queue, end = TensorQueue(0), threading.Event()
    thread = threading.Timer(20, end.wait) if kind == "timer" else threading.Thread(target=end.wait)
    thread.daemon = kind == "daemon"
    thread.start()
    try:
        assert tensor_queue.has_one_thread() == (kind != "thread")
    finally:
        end.set()
        if isinstance(thread, threading.Timer):
            thread.cancel()
        thread.join()


def test_a_thread_with_the_number_of_one_that_has_ended_is_another() -> None:
    tensor_queue = TensorQueue(0)
    tensor_queue.notice(("allreduce", "x"), find_call_site())
    numbers = set()
    for count in range(1, MANY_THREADS + 3):
        with asking(tensor_queue) as thread:
            numbers.add(thread.ident)
            assert not tensor_queue.has_one_thread(), f"thread {count} with number {thread.ident} is not known"
    if len(numbers) == count:
        pytest.skip("this system gives every thread a number of its own")


def in_backward(ask: Callable[[], bool], over: threading.Event, *, callers: int) -> bool:
    """What `ask` returns in a thread of autograd (it has one for each GPU), when so many threads of the program wait.

    over: that thread lives until then.
    """
    found: list[bool] = []
    ends = [threading.Lock() for _ in range(callers)]

    def _engine_run_backward(end: threading.Lock) -> None:
        end.acquire()

    def run() -> None:
        doubled = 2 * torch.ones(1, requires_grad=True)
        doubled.register_hook(lambda gradient: found.append(ask()))
        doubled.backward()
        over.wait(20)

    for end in ends:
        end.acquire()
    threads = [threading.Thread(target=_engine_run_backward, args=(end,)) for end in ends]
    for thread in threads:
        thread.start()
    _thread.start_new_thread(run, ())
    while not found:
        time.sleep(0.001)
    for end, thread in zip(ends, threads, strict=True):
        end.release()
        thread.join()
    return found[0]


def test_who_waits_for_a_backward_pass_asks_for_nothing_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor_queue = TensorQueue(0)
    lasting, main = system.lasting_threads, threading.main_thread()
    monkeypatch.setattr(system, "lasting_threads", lambda: [each for each in lasting() if each is not main])

    def ask() -> bool:
        tensor_queue.notice(("allreduce", "x"), find_call_site())
        return tensor_queue.has_one_thread()

    over = threading.Event()
    assert in_backward(ask, over, callers=1)
    # Autograd's thread lives on, and asks for nothing by itself.
    assert tensor_queue.has_one_thread()
    # Of another GPU: the first one may ask for something in the same pass.
    assert not in_backward(ask, over, callers=1)
    tensor_queue = TensorQueue(0)
    # It may be the other one that has called this pass.
    assert not in_backward(ask, over, callers=2)
    over.set()


def test_every_kind_counts_for_itself() -> None:
    names = AutomaticNames()
    kinds = ("allreduce", "allreduce", "barrier", "allreduce")
    assert [names.next(kind) for kind in kinds] == ["noname.0", "noname.1", "noname.0", "noname.2"]
    names.counts()["allreduce"] = 7
    assert names.counts() == {"allreduce": 3, "barrier": 1}, "what was returned is a copy"


def test_aligned_names_go_on_alike() -> None:
    one, other = AutomaticNames(), AutomaticNames()
    one.next("allreduce")
    other.next("barrier")
    for names in (one, other):
        names.align({"allreduce": 1, "barrier": 1})
    assert one.counts() == other.counts()
    assert one.next("allreduce") == other.next("allreduce") == "noname.1"


def test_it_is_the_line_of_the_call() -> None:
    place, line = find_call_site(0), sys._getframe().f_lineno
    assert str(place) == f"{__file__}:{line}"


def test_it_is_that_of_each_call_in_a_loop_over_lines() -> None:
    first = sys._getframe().f_lineno
    places: list[CallSite] = [
        find_call_site(0),
        find_call_site(0),
    ]
    assert [str(each) for each in places] == [f"{__file__}:{first + 2}", f"{__file__}:{first + 3}"]
