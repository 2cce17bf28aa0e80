"""What can be called: anything that has a name on both workers; and what happens to the rest."""

import pickle
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

Start = Callable[..., Callable[[], Any]]


class Counter:
    def __init__(self, start: int) -> None:
        self.start = start

    def plus(self, number: int) -> int:
        return self.start + number

    def __call__(self, number: int) -> int:
        return self.start * number

    @staticmethod
    def double(number: int) -> int:
        return 2 * number

    @classmethod
    def name(cls) -> str:
        return cls.__name__

    class Inner:
        def __eq__(self, other: object) -> bool:
            return type(other) is type(self)

        __hash__ = None  # type: ignore[assignment]


class OnlyThere:
    """Exists on one worker alone while a test says so."""


def get(what: str) -> Any:
    """A result that cannot travel."""
    return {"lambda": lambda: 1, "lock": threading.Lock(), "future": torch.futures.Future()}[what]


def make_only_there(name: str) -> Any:
    """An instance of a class that this worker alone has."""
    made = type(name, (OnlyThere,), {"__module__": __name__})
    setattr(sys.modules[__name__], name, made)
    return made()


@pytest.fixture
def peer(hvd: ModuleType) -> int:
    """The rank that this one calls; itself in a job of one rank."""
    return (int(hvd.rank()) + 1) % int(hvd.size())


@pytest.fixture
def starts(rpc: ModuleType, peer: int) -> dict[str, Start]:
    """The forms of call: each starts one on the peer and returns what waits for the result."""

    def sync(func: Any, *args: Any) -> Callable[[], Any]:
        result = rpc.rpc_sync(peer, func, args)
        return lambda: result

    return {
        "sync": sync,
        "async": lambda func, *args: rpc.rpc_async(peer, func, args).wait,
        "remote": lambda func, *args: rpc.remote(peer, func, args).to_here,
    }


def test_callables_travel_by_name(starts: dict[str, Start]) -> None:
    for start in starts.values():
        assert start(min, 3, 2)() == 2
        assert start(dict, [(1, 2)])() == {1: 2}
        assert start(Counter.double, 4)() == 8
        assert start(Counter.name)() == "Counter"
        assert start(Counter(3).plus, 4)() == 7
        assert start(Counter(3), 4)() == 12
        assert start(Counter.Inner)() == Counter.Inner()
        assert start("abc".upper)() == "ABC"


def test_functions_of_torch(starts: dict[str, Start]) -> None:
    ones = torch.ones(2, 2)
    table: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
        (torch.add, (ones, 1)),
        (torch.nonzero, (torch.tensor([0, 1, 1]),)),
        (torch.stack, ([ones, ones + 1],)),
        (torch.linalg.multi_dot, ([ones, ones, ones],)),
        (torch.nn.functional.relu, (ones - 2,)),
        (torch.Tensor.add, (ones, 1)),
        (ones.mul, (4,)),
    ]
    for start in starts.values():
        for func, args in table:
            assert torch.equal(start(func, *args)(), func(*args)), func
        assert [part.tolist() for part in start(torch.split, torch.arange(5), 2)()] == [[0, 1], [2, 3], [4]]


def test_module_classes_make_modules(starts: dict[str, Start]) -> None:
    for start in starts.values():
        layer = start(torch.nn.Linear, 2, 3)()
        assert type(layer) is torch.nn.Linear
        assert layer(torch.ones(2)).shape == (3,)


def test_what_cannot_be_called_is_refused_at_the_call(starts: dict[str, Start]) -> None:
    for start in starts.values():
        for func in (1, "min", None, torch.ones(1)):
            with pytest.raises(TypeError, match=r"function should be callable\."):
                start(func)


def test_functions_without_a_name_are_refused_at_the_call(starts: dict[str, Start]) -> None:
    def local() -> None:
        pass

    for start in starts.values():
        for func in (local, lambda: None):
            with pytest.raises((AttributeError, pickle.PicklingError), match="local object"):
                start(func)
            with pytest.raises((AttributeError, pickle.PicklingError), match="local object"):
                start(len, [torch.ones(5000), func])
        assert start(len, [1])() == 1


def test_futures_are_refused_at_the_call(starts: dict[str, Start]) -> None:
    for start in starts.values():
        with pytest.raises(RuntimeError, match=r"Can not pickle torch\.futures\.Future"):
            start(len, [torch.futures.Future()])
        assert start(len, [1])() == 1


def test_results_that_cannot_travel_are_errors_of_the_caller(hvd: ModuleType, starts: dict[str, Start]) -> None:
    if hvd.size() == 1:
        # On its owner a value does not travel.
        del starts["remote"]
    texts = {"lambda": "local object", "lock": "cannot pickle", "future": r"Can not pickle torch\.futures\.Future"}
    for start in starts.values():
        for what, text in texts.items():
            with pytest.raises(RuntimeError, match=text):
                start(get, what)()
            assert start(len, [1])() == 1


@pytest.mark.mpi(min_size=2)
def test_a_function_that_the_callee_lacks_is_a_runtime_error(
    hvd: ModuleType, starts: dict[str, Start], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"only_on_{hvd.rank()}"

    def only_here() -> None:
        pass

    only_here.__qualname__ = name
    monkeypatch.setattr(sys.modules[__name__], name, only_here, raising=False)
    for start in starts.values():
        with pytest.raises(RuntimeError, match=rf"{name}[\s\S]*RPC pickler does not serialize"):
            start(only_here)()
        assert start(len, [1])() == 1


@pytest.mark.mpi(min_size=2)
def test_a_result_whose_class_the_caller_lacks_is_a_runtime_error(hvd: ModuleType, starts: dict[str, Start]) -> None:
    name = f"MadeFor{hvd.rank()}"
    for start in starts.values():
        with pytest.raises(RuntimeError, match=rf"{name}[\s\S]*RPC pickler does not serialize"):
            start(make_only_there, name)()
        assert start(len, [1])() == 1
