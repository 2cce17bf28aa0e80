"""async_execution: functions that give their worker a future, whose value is what the caller gets."""

import pickle
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from support.rpc.doors import await_promise, break_promise, keep_promise

import hvlike.rpc
from hvlike.rpc.agent.futures import async_execution, is_async

Form = Callable[..., Any]


def synchronous(rpc: ModuleType, *call: Any) -> Any:
    return rpc.rpc_sync(*call)


def asynchronous(rpc: ModuleType, *call: Any) -> Any:
    return rpc.rpc_async(*call).wait()


def referred(rpc: ModuleType, *call: Any) -> Any:
    return rpc.remote(*call).to_here()


FORMS = pytest.mark.parametrize("form", [synchronous, asynchronous, referred])


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
        return hvlike.rpc.rpc_async(to, torch.add, (x, y)).then(lambda future: future.wait() + 1)

    @classmethod
    @async_execution
    def of_class(cls, to: int, x: torch.Tensor, y: int) -> Any:
        promised: torch.futures.Future[torch.Tensor] = torch.futures.Future()
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
def raise_before() -> torch.futures.Future[int]:
    raise ValueError("before there is a future")


@async_execution
def done_already() -> torch.futures.Future[int]:
    future: torch.futures.Future[int] = torch.futures.Future()
    future.set_result(4)
    return future


@async_execution
def done_by_a_thread() -> torch.futures.Future[str]:
    future: torch.futures.Future[str] = torch.futures.Future()
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


def plain_future() -> torch.futures.Future[int]:
    future: torch.futures.Future[int] = torch.futures.Future()
    future.set_result(4)
    return future


class ParameterServer:
    """Answers all trainers with the sum of what they have brought, once all have."""

    def __init__(self, trainers: int) -> None:
        self.trainers = trainers
        self.brought: list[torch.Tensor] = []
        self.lock = threading.Lock()
        self.updated: torch.futures.Future[torch.Tensor] = torch.futures.Future()

    @async_execution
    def bring(self, gradient: torch.Tensor) -> Any:
        with self.lock:
            updated = self.updated
            self.brought.append(gradient)
            if len(self.brought) < self.trainers:
                return updated
            total = torch.stack(self.brought).sum(0)
            self.brought, self.updated = [], torch.futures.Future()
        updated.set_result(total)
        return updated


@pytest.fixture
def peer(hvd: ModuleType) -> int:
    """The rank that this one calls; itself in a job of one rank."""
    return (int(hvd.rank()) + 1) % int(hvd.size())


@pytest.fixture
def third(hvd: ModuleType, peer: int) -> int:
    """The rank that this one calls."""
    return (peer + 1) % int(hvd.size())


@pytest.fixture
def name(hvd: ModuleType, request: pytest.FixtureRequest) -> str:
    """A promise of this rank in this test."""
    return f"{request.node.name} {hvd.rank()}"


@FORMS
@pytest.mark.parametrize(
    "function",
    [add_later, Adder.static, Adder.of_class, Adder().bound, Adder.decorated_outside],
    ids=lambda each: each.__name__,
)
def test_the_caller_gets_what_the_future_completes_with(
    rpc: ModuleType, peer: int, third: int, form: Form, function: Callable[..., Any]
) -> None:
    x = torch.ones(2)
    assert torch.equal(form(rpc, peer, function, (third, x, 1)), torch.full((2,), 3.0))
    assert torch.equal(x, torch.ones(2))


@pytest.mark.parametrize("method", ["static", "of_class", "bound", "decorated_outside"])
def test_methods_through_proxies(rpc: ModuleType, peer: int, third: int, method: str) -> None:
    reference = rpc.remote(peer, Adder)
    arguments = (third, torch.ones(2), 1)
    results = [
        getattr(reference.rpc_sync(), method)(*arguments),
        getattr(reference.rpc_async(), method)(*arguments).wait(),
        getattr(reference.remote(), method)(*arguments).to_here(),
    ]
    for result in results:
        assert torch.equal(result, torch.full((2,), 3.0))


def test_called_directly_it_returns_its_future() -> None:
    future = done_already()
    assert isinstance(future, torch.futures.Future)
    assert future.wait() == 4


def test_sixty_open_ones_hold_no_thread(rpc: ModuleType, peer: int, name: str) -> None:
    open_ones = [rpc.rpc_async(peer, await_promise, (name,)) for _ in range(60)]
    references = [rpc.remote(peer, await_promise, (name,)) for _ in range(60)]
    assert torch.futures.wait_all([rpc.rpc_async(peer, max, (each, -1)) for each in range(60)]) == list(range(60))
    assert not any(each.done() for each in open_ones)
    rpc.rpc_sync(peer, keep_promise, (name, 9))
    assert torch.futures.wait_all(open_ones) == [9] * 60
    assert [each.to_here() for each in references] == [9] * 60


@FORMS
def test_a_future_that_is_done_already(rpc: ModuleType, peer: int, form: Form) -> None:
    assert form(rpc, peer, done_already) == 4


@FORMS
def test_a_future_that_a_thread_of_the_program_completes(rpc: ModuleType, peer: int, form: Form) -> None:
    assert form(rpc, peer, done_by_a_thread) == "mine"


@FORMS
def test_what_is_no_future_is_an_error(rpc: ModuleType, peer: int, form: Form) -> None:
    text = (
        "Functions decorated with @rpc.async_function must return a torch.futures.Future object, but got builtins.list"
    )
    with pytest.raises(RuntimeError, match=text):
        form(rpc, peer, give_a_list)


@FORMS
def test_an_exception_before_there_is_a_future_is_an_ordinary_one(rpc: ModuleType, peer: int, form: Form) -> None:
    with pytest.raises(ValueError, match="before there is a future"):
        form(rpc, peer, raise_before)


@FORMS
def test_an_error_of_the_future_reaches_the_caller(
    rpc: ModuleType, peer: int, third: int, form: Form, name: str
) -> None:
    with pytest.raises((RuntimeError, ZeroDivisionError), match="division by zero"):
        form(rpc, peer, failing_callback)
    with pytest.raises(RuntimeError, match="KeyError: On WorkerInfo"):
        form(rpc, peer, failing_call, (third,))
    rpc.rpc_async(peer, break_promise, (name, ValueError("broken")))
    with pytest.raises(ValueError, match="broken"):
        form(rpc, peer, await_promise, (name,))
    assert rpc.rpc_sync(peer, min, (1, 2)) == 1


@FORMS
def test_a_future_of_something_that_cannot_travel(
    hvd: ModuleType, rpc: ModuleType, peer: int, form: Form, name: str
) -> None:
    if form is referred and peer == hvd.rank():
        pytest.skip("its owner need not send it")
    rpc.rpc_sync(peer, promise_a_lambda, (name,))
    with pytest.raises((RuntimeError, AttributeError, pickle.PicklingError), match=r"[Pp]ickle"):
        form(rpc, peer, await_promise, (name,))
    assert rpc.rpc_sync(peer, min, (1, 2)) == 1


def promise_a_lambda(name: str) -> None:
    keep_promise(name, lambda: None)


@pytest.mark.parametrize("rounds", [3])
def test_other_calls_complete_it(hvd: ModuleType, rpc: ModuleType, rounds: int) -> None:
    """A parameter server: the last trainer's call completes the futures that the others got."""
    if hvd.rank() == 0:
        server = rpc.remote(0, ParameterServer, (3,))
        trainers = [rpc.remote(each % hvd.size(), train, (server, each, rounds)) for each in range(3)]
        for trainer in trainers:
            assert trainer.to_here() == [sum(range(3)) + 3.0 * each for each in range(rounds)]


def train(server: Any, number: int, rounds: int) -> list[float]:
    return [float(server.rpc_sync().bring(torch.tensor(float(number + each)))) for each in range(rounds)]


def test_which_functions_are_marked() -> None:
    from functools import partial

    marked: list[Any] = [add_later, Adder.static, Adder.of_class, Adder().bound, partial(add_later, 0)]
    assert all(is_async(each) for each in marked)
    others: list[Any] = [plain_future, min, torch.add, Adder, Adder(), partial(min, 1)]
    assert not any(is_async(each) for each in others)


def test_functions_marked_by_torch_count_too() -> None:
    from torch.distributed.rpc.functions import async_execution as torchs

    assert is_async(torchs(plain_future))


def test_callables_without_attributes_are_wrapped() -> None:
    marked = async_execution(Server().give)
    assert is_async(marked)
    assert marked().wait() == 4
    assert not is_async(Server().give)


class Server:
    """Its bound methods take no attributes."""

    def give(self) -> torch.futures.Future[int]:
        return plain_future()
