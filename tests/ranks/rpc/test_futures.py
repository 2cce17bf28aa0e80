"""The futures of rpc_async: torch's own in every respect that programs use."""

import threading
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from support.rpc.doors import open_door, pass_door

import hvlike.rpc

Future = torch.futures.Future


def give_a_future() -> Any:
    return torch.futures.Future()


def ask_on(to: int, value: int, future: Any) -> int:
    """A callback that blocks on another call."""
    return int(hvlike.rpc.rpc_sync(to, max, (future.wait(), value)))


@pytest.fixture
def peer(hvd: ModuleType) -> int:
    """The rank that this one calls; itself in a job of one rank."""
    return (int(hvd.rank()) + 1) % int(hvd.size())


@pytest.fixture
def name(hvd: ModuleType, request: pytest.FixtureRequest) -> str:
    """A door at which only calls of this rank in this test wait."""
    return f"{request.node.name} {hvd.rank()}"


def test_it_is_a_future_of_torch(rpc: ModuleType, peer: int, name: str) -> None:
    future = rpc.rpc_async(peer, pass_door, (name, "value"))
    assert isinstance(future, torch._C.Future)
    assert not future.done()
    rpc.rpc_sync(peer, open_door, (name,))
    for _ in range(3):
        assert future.wait() == "value"
    assert future.done()
    assert future.value() == "value"


def test_twenty_callbacks_in_a_chain(rpc: ModuleType, peer: int) -> None:
    future = rpc.rpc_async(peer, torch.add, (torch.ones(2), 1))
    for _ in range(20):
        future = future.then(lambda before: before.wait() + 1)
    assert torch.equal(future.wait(), torch.full((2,), 22.0))


def test_partial_functions_as_callbacks(rpc: ModuleType, peer: int) -> None:
    def add(number: int, future: Any) -> int:
        return number + int(future.wait())

    assert rpc.rpc_async(peer, max, (1, 2)).then(partial(add, 5)).wait() == 7


def test_callbacks_may_wait_for_calls_of_their_own(hvd: ModuleType, rpc: ModuleType, peer: int) -> None:
    futures = [rpc.rpc_async(peer, max, (each, -1)).then(partial(ask_on, peer, 10)) for each in range(40)]
    assert torch.futures.wait_all(futures) == [max(each, 10) for each in range(40)]
    to_self = rpc.rpc_async(hvd.rank(), max, (1, 2)).then(partial(ask_on, hvd.rank(), 3)).then(partial(ask_on, peer, 4))
    assert to_self.wait() == 4


def test_callbacks_may_start_calls_and_return_their_futures_value(rpc: ModuleType, peer: int) -> None:
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


def test_several_threads_wait_for_one(rpc: ModuleType, peer: int, name: str) -> None:
    future = rpc.rpc_async(peer, pass_door, (name, 3))
    results: list[int] = []
    threads = [threading.Thread(target=lambda: results.append(future.wait())) for _ in range(5)]
    for thread in threads:
        thread.start()
    # Python goes on while they wait in C++.
    rpc.rpc_sync(peer, open_door, (name,))
    for thread in threads:
        thread.join(30)
    assert results == [3] * 5


def test_wait_all_and_collect_all(rpc: ModuleType, peer: int) -> None:
    assert torch.futures.wait_all([rpc.rpc_async(peer, max, (each, 1)) for each in range(5)]) == [1, 1, 2, 3, 4]
    collected = torch.futures.collect_all([rpc.rpc_async(peer, max, (each, 1)) for each in range(5)])
    assert collected.then(lambda each: [one.wait() for one in each.wait()]).wait() == [1, 1, 2, 3, 4]


def test_a_finished_one_cannot_be_completed_again(rpc: ModuleType, peer: int) -> None:
    future = rpc.rpc_async(peer, max, (1, 2))
    assert future.wait() == 2
    with pytest.raises(RuntimeError, match="Future can only be marked completed once"):
        future.set_result(3)
    assert future.wait() == 2


def test_what_is_no_function_is_refused_as_a_callback(rpc: ModuleType, peer: int) -> None:
    future = rpc.rpc_async(peer, max, (1, 2))
    with pytest.raises(TypeError):
        future.then(None)
    assert future.wait() == 2


def test_a_future_among_the_arguments_is_refused_at_the_call(rpc: ModuleType, peer: int) -> None:
    future: Future[int] = Future()
    for form in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
        for argument in (future, [future], rpc.rpc_async(peer, max, (1, 2))):
            with pytest.raises(RuntimeError, match=r"Can not pickle torch\.futures\.Future"):
                form(peer, print, (argument,))


def test_a_future_as_the_result_is_an_error(rpc: ModuleType, peer: int) -> None:
    for form in (rpc.rpc_sync, lambda *call: rpc.rpc_async(*call).wait()):
        with pytest.raises(RuntimeError, match=r"Can not pickle torch\.futures\.Future"):
            form(peer, give_a_future)
    assert rpc.rpc_sync(peer, min, (1, 2)) == 1


@pytest.mark.mpi(min_size=2)
def test_a_future_as_the_value_of_an_rref_cannot_be_fetched(rpc: ModuleType, peer: int) -> None:
    with pytest.raises(RuntimeError, match=r"Can not pickle torch\.futures\.Future"):
        rpc.remote(peer, give_a_future).to_here()
    assert rpc.rpc_sync(peer, min, (1, 2)) == 1


def test_a_thousand_at_once(rpc: ModuleType, peer: int) -> None:
    futures = [rpc.rpc_async(peer, max, (each, -1)) for each in range(1000)]
    assert [future.wait() for future in futures] == list(range(1000))


def test_forgotten_ones_do_not_stop_the_others(rpc: ModuleType, peer: int) -> None:
    for each in range(100):
        rpc.rpc_async(peer, max, (each, -1)).then(lambda future: 1 / 0)
    assert rpc.rpc_sync(peer, max, (1, 2)) == 2
