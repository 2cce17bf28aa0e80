"""Futures of both sides: those of rpc_async are torch's own; a function marked async_execution gives its worker one.

What is torch's own about them is in tests/unit/rpc/test_promises.py.
"""

import pickle
import threading
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from support.rpc.doors import await_promise, break_promise, keep_promise, open_door, pass_door
from support.rpc.forms import FORMS, Form, referred

import hvlike.rpc
from hvlike.rpc.agent.futures import async_execution, is_async

Future = torch.futures.Future
EACH_FORM = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def ask_on(to: int, value: int, future: Any) -> int:
    """A callback that blocks on another call."""
    return int(hvlike.rpc.rpc_sync(to, max, (future.wait(), value)))


def test_it_is_a_future_of_torch_that_many_may_wait_for(rpc: ModuleType, peer: int, name: str) -> None:
    future = rpc.rpc_async(peer, pass_door, (name, 3))
    assert isinstance(future, torch._C.Future)
    assert not future.done()
    results: list[int] = []
    threads = [threading.Thread(target=lambda: results.append(future.wait())) for _ in range(5)]
    for thread in threads:
        thread.start()
    # Python goes on while they wait in C++.
    rpc.rpc_sync(peer, open_door, (name,))
    for thread in threads:
        thread.join(30)
    assert results == [3] * 5
    assert (future.done(), future.value()) == (True, 3)
    with pytest.raises(RuntimeError, match="Future can only be marked completed once"):
        future.set_result(3)


def test_callbacks_may_wait_for_calls_of_their_own(hvd: ModuleType, rpc: ModuleType, peer: int) -> None:
    futures = [rpc.rpc_async(peer, max, (each, -1)).then(partial(ask_on, peer, 10)) for each in range(40)]
    assert torch.futures.wait_all(futures) == [max(each, 10) for each in range(40)]
    to_self = rpc.rpc_async(hvd.rank(), max, (1, 2)).then(partial(ask_on, hvd.rank(), 3)).then(partial(ask_on, peer, 4))
    assert to_self.wait() == 4


def test_callbacks_may_start_calls(rpc: ModuleType, peer: int) -> None:
    results: list[int] = []
    started = threading.Event()

    def start(future: Any) -> None:
        rpc.rpc_async(peer, max, (future.wait(), 5)).then(lambda last: results.append(last.wait())).then(
            lambda _: started.set()
        )

    rpc.rpc_async(peer, max, (1, 2)).then(start).wait()
    assert started.wait(30)
    assert results == [5]


def test_done_callbacks_run_before_and_after_it_is_done(rpc: ModuleType, peer: int, name: str) -> None:
    seen: list[int] = []
    called = threading.Event()
    future = rpc.rpc_async(peer, pass_door, (name, 3))
    future.add_done_callback(lambda each: seen.append(each.wait()))
    future.add_done_callback(lambda _: called.set())
    rpc.rpc_sync(peer, open_door, (name,))
    assert future.wait() == 3
    assert called.wait(30)
    future.add_done_callback(lambda each: seen.append(each.wait() + 1))
    assert seen == [3, 4]


def test_forgotten_ones_do_not_stop_the_others(rpc: ModuleType, peer: int) -> None:
    for each in range(100):
        rpc.rpc_async(peer, max, (each, -1)).then(lambda future: 1 / 0)
    collected = torch.futures.collect_all([rpc.rpc_async(peer, max, (each, 1)) for each in range(5)])
    assert collected.then(lambda each: [one.wait() for one in each.wait()]).wait() == [1, 1, 2, 3, 4]


# -- functions that answer with a future ------------------------------------------------------------------


@async_execution
def add_later(to: int, x: torch.Tensor, y: int) -> Any:
    """x + y on another worker, + 1 here."""
    return hvlike.rpc.rpc_async(to, torch.add, (x, y)).then(lambda future: future.wait() + 1)


class Adder:
    """The same as methods of every kind."""

    def __init__(self, step: int = 1) -> None:
        self.step = step

    @staticmethod
    @async_execution
    def static(to: int, x: torch.Tensor, y: int) -> Any:
        return add_later(to, x, y)

    @classmethod
    @async_execution
    def of_class(cls, to: int, x: torch.Tensor, y: int) -> Any:
        promised: Future[torch.Tensor] = Future()
        hvlike.rpc.rpc_async(to, torch.add, (x, y)).then(lambda future: promised.set_result(future.wait() + cls().step))
        return promised

    @async_execution
    def bound(self, to: int, x: torch.Tensor, y: int) -> Any:
        return hvlike.rpc.rpc_async(to, torch.add, (x, y)).then(lambda future: future.wait() + self.step)

    @async_execution
    @staticmethod
    def decorated_outside(to: int, x: torch.Tensor, y: int) -> Any:
        return add_later(to, x, y)


@async_execution
def give_a_list() -> list[int]:
    return [1]


@async_execution
def raise_before() -> Future[int]:
    raise ValueError("before there is a future")


@async_execution
def done_already() -> Future[int]:
    return plain_future()


@async_execution
def done_by_a_thread() -> Future[str]:
    future: Future[str] = Future()
    threading.Thread(target=lambda: future.set_result(threading.current_thread().name), name="mine").start()
    return future


@async_execution
def failing_callback() -> Any:
    return hvlike.rpc.rpc_async(hvlike.rpc.get_worker_info(), min, (1, 2)).then(lambda future: 1 / 0)


@async_execution
def failing_call(to: int) -> Any:
    return hvlike.rpc.rpc_async(to, fail)


def fail() -> None:
    raise KeyError("far away")


def plain_future() -> Future[int]:
    future: Future[int] = Future()
    future.set_result(4)
    return future


@EACH_FORM
def test_the_caller_gets_what_the_future_completes_with(rpc: ModuleType, peer: int, third: int, form: Form) -> None:
    x = torch.ones(2)
    for function in (add_later, Adder.static, Adder.of_class, Adder().bound, Adder.decorated_outside):
        assert form(peer, function, (third, x, 1)).tolist() == [3, 3]
    assert x.tolist() == [1, 1]
    assert form(peer, done_already) == 4
    assert form(peer, done_by_a_thread) == "mine"


@pytest.mark.parametrize("method", ["static", "of_class", "bound", "decorated_outside"])
def test_methods_through_proxies(rpc: ModuleType, peer: int, third: int, method: str) -> None:
    reference = rpc.remote(peer, Adder)
    arguments = (third, torch.ones(2), 1)
    assert getattr(reference.rpc_sync(), method)(*arguments).tolist() == [3, 3]
    assert getattr(reference.rpc_async(), method)(*arguments).wait().tolist() == [3, 3]
    assert getattr(reference.remote(), method)(*arguments).to_here().tolist() == [3, 3]


def test_sixty_open_ones_hold_no_thread(rpc: ModuleType, peer: int, name: str) -> None:
    open_ones = [rpc.rpc_async(peer, await_promise, (name,)) for _ in range(60)]
    references = [rpc.remote(peer, await_promise, (name,)) for _ in range(60)]
    assert torch.futures.wait_all([rpc.rpc_async(peer, max, (each, -1)) for each in range(60)]) == list(range(60))
    assert not any(each.done() for each in open_ones)
    rpc.rpc_sync(peer, keep_promise, (name, 9))
    assert torch.futures.wait_all(open_ones) == [9] * 60
    assert [each.to_here() for each in references] == [9] * 60


@EACH_FORM
def test_errors_reach_the_caller(
    hvd: ModuleType, rpc: ModuleType, peer: int, third: int, form: Form, name: str
) -> None:
    text = "Functions decorated with @rpc.async_function must return a torch.futures.Future object, but got builtins."
    with pytest.raises(RuntimeError, match=f"{text}list"):
        form(peer, give_a_list)
    with pytest.raises(ValueError, match="before there is a future"):
        form(peer, raise_before)
    with pytest.raises((RuntimeError, ZeroDivisionError), match="division by zero"):
        form(peer, failing_callback)
    with pytest.raises(RuntimeError, match="KeyError: On WorkerInfo"):
        form(peer, failing_call, (third,))
    rpc.rpc_async(peer, break_promise, (name, ValueError("broken")))
    with pytest.raises(ValueError, match="broken"):
        form(peer, await_promise, (name,))
    # Its owner need not send it.
    if form is not referred or peer != hvd.rank():
        rpc.rpc_sync(peer, promise_a_lambda, (f"{name}, a lambda",))
        with pytest.raises((RuntimeError, AttributeError, pickle.PicklingError), match=r"[Pp]ickle"):
            form(peer, await_promise, (f"{name}, a lambda",))
    assert rpc.rpc_sync(peer, min, (1, 2)) == 1


def promise_a_lambda(name: str) -> None:
    keep_promise(name, lambda: None)


@pytest.mark.pure
def test_which_functions_are_marked() -> None:
    from torch.distributed.rpc.functions import async_execution as torchs

    others: list[Any] = [plain_future, min, torch.add, Adder, Adder(), partial(min, 1)]
    assert not any(is_async(each) for each in others)
    marked: list[Any] = [add_later, Adder.static, Adder.of_class, Adder().bound, partial(add_later, 0)]
    assert all(is_async(each) for each in [*marked, torchs(plain_future)])
    # A callable that takes no attributes is wrapped.
    wrapped: Callable[[], Any] = async_execution(Giver().give)
    assert is_async(wrapped)
    assert wrapped().wait() == 4
    assert not is_async(Giver().give)


class Giver:
    """Its bound methods take no attributes."""

    def give(self) -> Future[int]:
        return plain_future()
