"""Methods of a value, called through its RRef."""

from types import ModuleType
from typing import Any

import pytest
import torch
from support.rpc.doors import keep_promise, open_door, pass_door
from support.rpc.values import Counter, Private, give_back


def test_results_of_the_three_forms(rpc: ModuleType, peer: int) -> None:
    rref = rpc.remote(peer, Counter)
    assert rref.rpc_sync().add(2) == 2
    assert rref.rpc_async().add(step=3).wait() == 5
    assert rref.remote().add().to_here() == 6
    assert rref.rpc_sync().read() == 6


def test_on_the_owner(rpc: ModuleType) -> None:
    counter = Counter()
    rref = rpc.RRef(counter)
    assert rref.rpc_sync().add() == 1
    assert rref.rpc_async().add().wait() == 2
    assert rref.remote().add().to_here() == 3
    assert counter.count == 3


def test_a_proxy_can_be_used_again(rpc: ModuleType, peer: int) -> None:
    rref = rpc.remote(peer, Counter)
    proxy = rref.rpc_sync()
    add = proxy.add
    assert [proxy.add(), add(), proxy.add(5), proxy.read()] == [1, 2, 7, 7]


def test_methods_of_tensors(rpc: ModuleType, peer: int) -> None:
    rref = rpc.remote(peer, torch.ones, (2,))
    assert torch.equal(rref.rpc_sync().add(1), torch.full((2,), 2.0))
    assert rref.rpc_async().size().wait() == torch.Size([2])
    rref.rpc_sync().mul_(3)
    assert torch.equal(rref.to_here(), torch.full((2,), 3.0))


def test_attributes_that_the_type_lacks(rpc: ModuleType, peer: int) -> None:
    rref = rpc.remote(peer, Counter)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        rref.rpc_sync().nothing()
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        rref.remote().nothing()
    future = rref.rpc_async().nothing()
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        future.wait()
    # The instance has it, the type does not.
    with pytest.raises(AttributeError, match="has no attribute 'count'"):
        rref.rpc_sync().count()
    with pytest.raises(TypeError, match="not callable"):
        rref.rpc_sync().limit()


def test_errors_of_methods(rpc: ModuleType, peer: int) -> None:
    rref = rpc.remote(peer, Counter)
    with pytest.raises(RuntimeError, match="Private"):
        rref.rpc_sync().fail()
    with pytest.raises(RuntimeError, match="Private"):
        rref.rpc_async().fail().wait()
    failed = rref.remote().fail()
    with pytest.raises(Private, match="on purpose"):
        failed.to_here()


@pytest.mark.parametrize("method", ["later", "static_later", "class_later"])
@pytest.mark.parametrize("form", ["rpc_sync", "rpc_async", "remote"])
def test_methods_that_answer_later(rpc: ModuleType, peer: int, name: str, form: str, method: str) -> None:
    rref = rpc.remote(peer, Counter)
    if form == "rpc_sync":
        rpc.rpc_sync(peer, keep_promise, (name, "kept"))
        assert getattr(rref.rpc_sync(), method)(name) == "kept"
        return
    result = getattr(getattr(rref, form)(), method)(name)
    rpc.rpc_sync(peer, keep_promise, (name, "kept"))
    assert (result.wait() if form == "rpc_async" else result.to_here()) == "kept"


def test_the_time_limit_covers_the_method(rpc: ModuleType, peer: int, name: str) -> None:
    rref = rpc.remote(peer, Counter)
    with pytest.raises(RuntimeError, match="RPC ran for more than"):
        rref.rpc_sync(timeout=0.02).wait(name)
    with pytest.raises(RuntimeError, match="RPC ran for more than"):
        rref.rpc_async(timeout=0.02).wait(name).wait()
    with pytest.raises(RuntimeError, match="RPC ran for more than"):
        rref.remote(timeout=0.02).wait(name)._get_future().wait()
    rpc.rpc_sync(peer, open_door, (name,))
    assert rref.rpc_sync(timeout=20).wait(name) == name
    assert rref.rpc_sync(timeout=0).wait(name) == name


@pytest.mark.parametrize("form", ["rpc_sync", "rpc_async", "remote"])
def test_the_time_limit_covers_the_look_up_of_the_type(rpc: ModuleType, peer: int, name: str, form: str) -> None:
    rref = rpc.remote(peer, pass_door, (name, Counter()))
    read = getattr(rref, form)(timeout=0.02).read
    with pytest.raises(RuntimeError, match="RPC ran for more than"):
        # Of the three, only rpc_async waits no longer at the call.
        read().wait()
    rpc.rpc_sync(peer, open_door, (name,))
    # A look-up that failed is made again.
    assert rref.rpc_sync().read() == 0


def test_types(rpc: ModuleType, peer: int) -> None:
    rref = rpc.remote(peer, Counter)
    assert rref._get_type() is Counter
    futures = [rref._get_type(blocking=False) for _ in range(3)]
    assert all(future is futures[0] for future in futures)
    assert futures[0].wait() is Counter
    assert rpc.RRef(torch.ones(2))._get_type() is torch.Tensor
    assert rpc.RRef(Counter())._get_type(blocking=False).wait() is Counter


def test_looking_up_a_type_holds_no_thread(rpc: ModuleType, peer: int, name: str) -> None:
    rref = rpc.remote(peer, pass_door, (name, 1))
    copies = [rpc.rpc_sync(peer, give_back, (rref,)) for _ in range(40)]
    futures = [copy._get_type(blocking=False) for copy in copies]
    rpc.rpc_sync(peer, open_door, (name,), timeout=20)
    assert [future.wait() for future in futures] == [int] * 40


def test_two_workers_use_one_value(rpc: ModuleType, hvd: ModuleType) -> None:
    counters: list[Any] = [rpc.RRef(Counter()) for _ in range(hvd.size())]
    for to in range(hvd.size()):
        rpc.rpc_sync(to, add_through, (counters[to], 10))
    assert [counter.local_value().count for counter in counters] == [10] * hvd.size()


def add_through(rref: Any, times: int) -> None:
    """Count on by calls through an RRef."""
    for future in [rref.rpc_async().add() for _ in range(times)]:
        future.wait()
