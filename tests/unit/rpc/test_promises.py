"""The side of a future that completes it: values, two kinds of errors, and what a program does to it meanwhile."""

import gc
import threading
import weakref

import pytest
import torch

from hvlike.errors import UsageError
from hvlike.rpc.agent.futures import Promise


class Value:
    """Something that can be watched."""


class Picky(Exception):
    """Cannot be made anew from its arguments."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)


def test_the_future_is_torchs_and_gives_the_very_value() -> None:
    promise, value = Promise(), Value()
    assert isinstance(promise.future, torch._C.Future)
    assert not promise.future.done()
    promise.set_result(value)
    assert promise.future.done()
    assert promise.future.wait() is value
    assert promise.future.value() is value


@pytest.mark.parametrize("kept", [ValueError("v"), TypeError("t"), UsageError("u"), AttributeError("a")])
def test_errors_that_are_no_runtime_errors_keep_their_class(kept: Exception) -> None:
    promise = Promise()
    promise.set_error(kept)
    for read in (promise.future.wait, promise.future.value, promise.future.wait):
        with pytest.raises(type(kept)) as caught:
            read()
        assert str(caught.value) == str(kept)
        assert caught.value is not kept


def test_an_error_that_cannot_be_made_anew_becomes_a_runtime_error() -> None:
    promise = Promise()
    promise.set_error(Picky("one", "two"))
    with pytest.raises(RuntimeError, match="Picky: one"):
        promise.future.wait()


def test_wait_all_leaves_at_a_runtime_error_while_others_are_open() -> None:
    first, second = Promise(), Promise()
    timer = threading.Timer(0.05, second.set_error, (RuntimeError("KeyError: On ключ"),))
    timer.start()
    with pytest.raises(RuntimeError, match="KeyError: On ключ"):
        torch.futures.wait_all([first.future, second.future])
    assert not first.future.done()
    first.set_result(1)
    timer.join()


def test_callbacks_run_in_the_thread_that_completes_it_and_can_be_chained() -> None:
    promise, threads = Promise(), []
    future = promise.future
    for _ in range(20):
        future = future.then(lambda before: before.wait() + 1)
    promise.future.add_done_callback(lambda _: threads.append(threading.current_thread().name))
    thread = threading.Thread(target=promise.set_result, args=(0,), name="completing")
    thread.start()
    assert future.wait() == 20
    thread.join()
    assert threads == ["completing"]


@pytest.mark.parametrize("error", [ValueError("the reason"), RuntimeError("the reason")])
def test_callbacks_get_the_error(error: Exception) -> None:
    promise = Promise()
    chained = promise.future.then(lambda future: future.wait())
    promise.set_error(error)
    with pytest.raises(RuntimeError, match="the reason"):
        chained.wait()


def test_a_program_may_complete_it_before_the_reply() -> None:
    for error in (None, ValueError("late"), RuntimeError("late")):
        promise = Promise()
        promise.future.set_result(1)
        if error is None:
            promise.set_result(2)
        else:
            promise.set_error(error)
        assert promise.future.wait() == 1


def test_nothing_outlives_its_future() -> None:
    promise, value = Promise(), Value()
    watched = weakref.ref(value)
    promise.set_result(value)
    del value
    assert watched() is not None
    gc.disable()
    try:
        del promise
        assert watched() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("error", [ValueError, RuntimeError])
def test_an_error_that_was_raised_beside_its_promise_does_not_keep_it(error: type[Exception]) -> None:
    def fail(watched: Value) -> "weakref.ref[Value]":
        promise = Promise()
        try:
            raise error("x")
        except (ValueError, RuntimeError) as caught:
            raised = caught
        promise.set_error(raised)
        return weakref.ref(watched)

    reference = fail(Value())
    gc.collect()
    assert reference() is None


def test_waiting_for_an_error_keeps_no_frame_alive() -> None:
    promise = Promise()
    promise.set_error(ValueError("x"))

    def wait_for(watched: Value) -> "weakref.ref[Value]":
        with pytest.raises(ValueError):
            promise.future.wait()
        return weakref.ref(watched)

    reference = wait_for(Value())
    gc.collect()
    assert reference() is None
