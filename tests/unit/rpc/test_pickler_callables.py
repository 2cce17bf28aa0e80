"""Functions and classes on their way: by name, found again, or refused with the reason."""

import copyreg
import functools
import operator
import pickle
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional
from support.rpc.parcels import received, travel

from hvlike.errors import UsageError
from hvlike.rpc.wire.pickler import Incoming, Outgoing, pack, unpack

BY_NAME = [
    min,
    len,
    operator.add,
    functools.reduce,
    torch.add,
    torch.nonzero,
    torch.stack,
    torch.split,
    torch.ones,
    torch.linalg.multi_dot,
    torch.special.erf,
    torch.nn.functional.relu,
    torch.nn.functional.linear,
    torch.Tensor.add,
    torch.Tensor.numpy,
    torch.nn.Linear,
    dict,
    types.SimpleNamespace,
    BaseException,
    pytest.raises,
]


class Counter:
    limit = 5

    def __init__(self, start: torch.Tensor) -> None:
        self.start = start

    def plus(self, number: int) -> torch.Tensor:
        return self.start + number

    @staticmethod
    def double(number: int) -> int:
        return 2 * number

    @classmethod
    def most(cls) -> int:
        return cls.limit

    class Inner:
        pass


class Fragile:
    """Cannot be restored, for a reason of its own."""

    def __setstate__(self, state: Any) -> None:
        raise AttributeError("no such colour")

    def __getstate__(self) -> int:
        return 1


@pytest.mark.parametrize("func", BY_NAME, ids=str)
def test_functions_and_classes_arrive_as_the_same_object(func: Callable[..., Any]) -> None:
    packed = pack((func, (), {}), Outgoing(1))
    assert packed.storages == []
    assert unpack(packed, Incoming(0))[0] is func


def test_static_and_class_methods_and_inner_classes() -> None:
    assert travel(Counter.double)(4) == 8
    assert travel(Counter.most)() == 5
    assert travel(Counter.Inner) is Counter.Inner


def test_bound_methods_take_their_instance_along() -> None:
    counter = Counter(torch.ones(2))
    method, same = travel((counter.plus, counter))
    assert method(1).tolist() == [2, 2]
    assert method.__self__ is same
    assert travel("abc".upper)() == "ABC"
    assert travel([torch.ones(2).add])[0](1).tolist() == [2, 2]


def test_partial_functions() -> None:
    assert travel(functools.partial(torch.add, torch.ones(1)))(2).item() == 3


def test_registered_reductions_of_copyreg_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(copyreg.dispatch_table, Counter.Inner, lambda inner: (int, (7,)))
    assert travel(Counter.Inner()) == 7


@pytest.mark.parametrize("make", [lambda: lambda: 1, threading.Lock, lambda: sys])
def test_what_has_no_name_is_refused_as_pickle_does(make: Callable[[], Any]) -> None:
    with pytest.raises(Exception) as expected:
        pickle.dumps(make(), protocol=5)
    with pytest.raises(type(expected.value)):
        pack((len, (torch.ones(1), make()), {}), Outgoing(1))
    # The next message has nothing of the failed one.
    assert travel(len) is len
    assert travel([torch.zeros(1)])[0].item() == 0


def test_a_name_that_is_missing_here(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("rpc_only_there")
    exec("def function(): pass\nclass Class:\n def method(self): pass", module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for func in (module.function, module.Class.method, module.Class().method):
        packed = pack((func, (torch.ones(1),), {}), Outgoing(1))
        monkeypatch.setitem(sys.modules, module.__name__, types.ModuleType("rpc_only_there"))
        with pytest.raises(RuntimeError, match=r"rpc_only_there.*RPC pickler does not serialize"):
            unpack(received(packed), Incoming(0))
        monkeypatch.delitem(sys.modules, module.__name__)
        with pytest.raises(RuntimeError, match=r"rpc_only_there.*RPC pickler does not serialize"):
            unpack(received(packed), Incoming(0))
        monkeypatch.setitem(sys.modules, module.__name__, module)


def test_a_method_that_is_missing_here(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pack(Counter(torch.ones(1)).plus, Outgoing(1))
    monkeypatch.delattr(Counter, "plus")
    with pytest.raises(RuntimeError, match=r"'plus'.*RPC pickler does not serialize"):
        unpack(received(packed), Incoming(0))


def test_a_function_of_torch_that_is_missing_here() -> None:
    packed = pack(torch.add, Outgoing(1))
    packed = packed._replace(body=packed.body.replace(b"add", b"odd"))
    with pytest.raises(RuntimeError, match=r"'odd'.*RPC pickler does not serialize"):
        unpack(packed, Incoming(0))


def test_errors_of_restoring_objects_are_their_own() -> None:
    packed = pack(Fragile(), Outgoing(1))
    with pytest.raises(AttributeError, match=r"^no such colour$"):
        unpack(packed, Incoming(0))


def test_undo_is_called_backwards_when_packing_fails() -> None:
    calls: list[int] = []
    outgoing = Outgoing(1)
    outgoing.undo += [functools.partial(calls.append, number) for number in range(3)]
    pack(torch.ones(1), outgoing)
    assert calls == []
    with pytest.raises(RuntimeError, match=r"Can not pickle torch.futures.Future"):
        pack(torch.futures.Future(), outgoing)
    assert calls == [2, 1, 0]


def test_lambdas_travel_by_value_with_cloudpickle() -> None:
    pytest.importorskip("cloudpickle")
    weight = torch.nn.Parameter(torch.arange(3.0))
    outgoing = Outgoing(1, cloudpickle=True)
    func, (other, add) = travel((lambda x: weight * x, (weight, torch.add)), outgoing)
    assert func(2).tolist() == [0, 2, 4]
    assert func.__closure__[0].cell_contents is other
    assert add is torch.add
    assert [id(tensor) for tensor in outgoing.graded] == [id(weight)]
    assert travel(Counter.double, Outgoing(1, cloudpickle=True)) is Counter.double


def test_functions_and_classes_of_the_program_travel_by_name_with_cloudpickle_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("cloudpickle")
    program = types.ModuleType("__main__")
    exec("class Class:\n pass\ndef function(): pass\nnameless = lambda: Class", program.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", program)
    made, function, nameless = travel(
        (program.Class(), program.function, program.nameless), Outgoing(1, cloudpickle=True)
    )
    assert type(made) is program.Class
    assert function is program.function
    assert nameless is not program.nameless
    assert nameless() is program.Class


def test_without_cloudpickle_the_option_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(UsageError, match="pip install cloudpickle"):
        pack(1, Outgoing(1, cloudpickle=True))
