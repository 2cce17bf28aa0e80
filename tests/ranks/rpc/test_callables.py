"""What can be called: what has a name on both workers, anything with cloudpickle; and what happens to the rest."""

import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from support.rpc.forms import FORMS, asynchronous, synchronous

import hvlike.rpc


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


def run(func: Callable[..., Any], *args: Any) -> Any:
    return func(*args)


def adder(number: int) -> Callable[[int], int]:
    """A result that has no name."""
    return lambda other: number + other


def test_callables_travel_by_name(rpc: ModuleType, peer: int) -> None:
    for form in FORMS.values():
        assert form(peer, min, (3, 2)) == 2
        assert form(peer, dict, ([(1, 2)],)) == {1: 2}
        assert form(peer, Counter.double, (4,)) == 8
        assert form(peer, Counter.name) == "Counter"
        assert form(peer, Counter(3).plus, (4,)) == 7
        assert form(peer, Counter(3), (4,)) == 12
        assert form(peer, "abc".upper) == "ABC"


def test_functions_and_modules_of_torch(rpc: ModuleType, peer: int) -> None:
    ones = torch.ones(2, 2)
    table: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
        (torch.add, (ones, 1)),
        (torch.stack, ([ones, ones + 1],)),
        (torch.linalg.multi_dot, ([ones, ones, ones],)),
        (torch.nn.functional.relu, (ones - 2,)),
        (torch.Tensor.add, (ones, 1)),
        (ones.mul, (4,)),
    ]
    for form in FORMS.values():
        for func, args in table:
            assert torch.equal(form(peer, func, args), func(*args)), func
        assert [part.tolist() for part in form(peer, torch.split, (torch.arange(5), 2))] == [[0, 1], [2, 3], [4]]
        layer = form(peer, torch.nn.Linear, (2, 3))
        assert type(layer) is torch.nn.Linear
        assert layer(torch.ones(2)).shape == (3,)


def test_what_cannot_travel_is_refused_at_the_call(rpc: ModuleType, peer: int) -> None:
    def local() -> None:
        pass

    not_pickled = (AttributeError, pickle.PicklingError)
    for form in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
        for func in (1, "min", None, torch.ones(1)):
            with pytest.raises(TypeError, match=r"function should be callable\."):
                form(peer, func)
        for func in (local, lambda: None):
            with pytest.raises(not_pickled, match="local object"):
                form(peer, func)
            with pytest.raises(not_pickled, match="local object"):
                form(peer, len, ([torch.ones(5000), func],))
        future: torch.futures.Future[int] = torch.futures.Future()
        for argument in (future, [future], rpc.rpc_async(peer, max, (1, 2))):
            with pytest.raises(RuntimeError, match=r"Can not pickle torch\.futures\.Future"):
                form(peer, print, (argument,))
    assert rpc.rpc_sync(peer, len, ([1],)) == 1


def test_results_that_cannot_travel_are_errors_of_the_caller(hvd: ModuleType, rpc: ModuleType, peer: int) -> None:
    texts = {"lambda": "local object", "lock": "cannot pickle", "future": r"Can not pickle torch\.futures\.Future"}
    # On its owner a value does not travel.
    for form in (synchronous, asynchronous) if hvd.size() == 1 else FORMS.values():
        for what, text in texts.items():
            with pytest.raises(RuntimeError, match=text):
                form(peer, get, (what,))
            assert form(peer, len, ([1],)) == 1


@pytest.mark.mpi(min_size=2)
def test_what_the_other_worker_lacks_is_a_runtime_error(
    hvd: ModuleType, rpc: ModuleType, peer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def only_here() -> None:
        pass

    only_here.__qualname__ = f"only_on_{hvd.rank()}"
    monkeypatch.setattr(sys.modules[__name__], only_here.__qualname__, only_here, raising=False)
    made = f"MadeFor{hvd.rank()}"
    for form in FORMS.values():
        with pytest.raises(RuntimeError, match=rf"{only_here.__qualname__}[\s\S]*RPC pickler does not serialize"):
            form(peer, only_here)
        with pytest.raises(RuntimeError, match=rf"{made}[\s\S]*RPC pickler does not serialize"):
            form(peer, make_only_there, (made,))
        assert form(peer, len, ([1],)) == 1


@pytest.fixture
def cloudpickle(hvd: ModuleType) -> Iterator[ModuleType]:
    """A session with the option cloudpickle."""
    pytest.importorskip("cloudpickle")
    options = hvlike.rpc.RpcBackendOptions(cloudpickle=True)
    hvlike.rpc.init_rpc(f"worker{hvd.rank()}", rpc_backend_options=options)
    yield hvlike.rpc
    hvlike.rpc.shutdown(timeout=60)


def test_what_has_no_name_travels_with_cloudpickle(hvd: ModuleType, cloudpickle: ModuleType, peer: int) -> None:
    weight: torch.Tensor = torch.arange(3.0) + hvd.rank()

    class Local:
        def __init__(self, value: torch.Tensor) -> None:
            self.value = value

        def double(self) -> torch.Tensor:
            return self.value.mul(2)

    for form in FORMS.values():
        assert torch.equal(form(peer, lambda factor: weight.mul(factor), (2,)), weight * 2)
        assert form(peer, run, (lambda x: x + 1, 7)) == 8
        assert form(peer, adder, (3,))(4) == 7
        assert form(peer, Local(torch.ones(2)).double).tolist() == [2, 2]
        assert type(form(peer, run, (Local, torch.ones(2)))).__name__ == "Local"
        # What has a name still travels by it.
        assert form(peer, run, (type, run)) is type(run)
