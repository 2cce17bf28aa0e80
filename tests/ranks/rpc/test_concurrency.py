"""Calls at the same time: many at once, within each other, from several threads, while the main thread is elsewhere."""

import threading
import time
from types import ModuleType
from typing import Any

import pytest
import torch
from support.rpc.doors import door, open_door, pass_door, passes

import hvlike.rpc

THREADS = 16
"""Functions that a worker runs at a time, unless init_rpc is told otherwise."""


class Crowd:
    """Counts how many are inside at the same time on this worker."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inside = 0
        self.most = 0

    def enter(self) -> None:
        with self.lock:
            self.inside += 1
            self.most = max(self.most, self.inside)

    def leave(self) -> None:
        with self.lock:
            self.inside -= 1


CROWDS: dict[str, Crowd] = {}


def stay(name: str) -> int:
    """Be inside until the door opens."""
    crowd = CROWDS.setdefault(name, Crowd())
    crowd.enter()
    pass_door(name)
    crowd.leave()
    return crowd.most


def inside(name: str) -> int:
    return CROWDS.setdefault(name, Crowd()).inside


def bounce(turns: int, other: int) -> list[int]:
    """Call each other `turns` times from inside the calls; the ranks that were visited."""
    me = hvlike.rpc.get_worker_info().id
    if turns == 0:
        return [me]
    return [me, *hvlike.rpc.rpc_sync(other, bounce, (turns - 1, me))]


def ring(turns: int) -> int:
    """Pass a call on around the ring from inside the calls."""
    if turns == 0:
        return 0
    next_rank = (hvlike.rpc.get_worker_info().id + 1) % hvlike.size()
    result: int = hvlike.rpc.rpc_sync(next_rank, ring, (turns - 1,)) + 1
    return result


def is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def square(number: int) -> int:
    return number * number


@pytest.fixture
def peer(hvd: ModuleType) -> int:
    """The rank that this one calls; itself in a job of one rank."""
    return (int(hvd.rank()) + 1) % int(hvd.size())


@pytest.fixture
def name(hvd: ModuleType, request: pytest.FixtureRequest) -> str:
    """A door at which only calls of this rank in this test wait."""
    return f"{request.node.name} {hvd.rank()}"


def wait_for(condition: Any) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_a_thousand_calls_at_once(hvd: ModuleType, rpc: ModuleType) -> None:
    futures = [rpc.rpc_async(number % hvd.size(), square, (number,)) for number in range(1000)]
    assert torch.futures.wait_all(futures) == [number * number for number in range(1000)]


def test_functions_do_not_run_in_the_main_thread(rpc: ModuleType, peer: int) -> None:
    assert not rpc.rpc_sync(peer, is_main_thread)
    assert not rpc.rpc_async(peer, is_main_thread).wait()


def test_no_more_functions_run_at_once_than_there_are_threads(rpc: ModuleType, hvd: ModuleType, name: str) -> None:
    # Everyone is its own callee: on a shared one the calls of all would share the threads.
    futures = [rpc.rpc_async(hvd.rank(), stay, (name,)) for _ in range(THREADS + 10)]
    wait_for(lambda: inside(name) == THREADS)
    open_door(name)
    assert max(torch.futures.wait_all(futures)) == THREADS


def test_waiting_functions_do_not_keep_others_from_running(rpc: ModuleType, peer: int, name: str) -> None:
    waiting = [rpc.rpc_async(peer, pass_door, (name, number)) for number in range(3)]
    assert rpc.rpc_sync(peer, passes, (name,)) == 0
    rpc.rpc_sync(peer, open_door, (name,))
    assert torch.futures.wait_all(waiting) == [0, 1, 2]


def test_functions_call_back(hvd: ModuleType, rpc: ModuleType, peer: int) -> None:
    me = hvd.rank()
    assert rpc.rpc_sync(peer, bounce, (6, me)) == [peer, me, peer, me, peer, me, peer]


def test_functions_call_on_around_the_ring(rpc: ModuleType, peer: int) -> None:
    assert rpc.rpc_sync(peer, ring, (8,)) == 8


def test_functions_that_all_wait_for_each_other(rpc: ModuleType, peer: int) -> None:
    # Every rank at the same time: each has threads that wait for the next one's.
    futures = [rpc.rpc_async(peer, ring, (3,)) for _ in range(3)]
    assert torch.futures.wait_all(futures) == [3, 3, 3]


def test_calls_of_several_threads(rpc: ModuleType, hvd: ModuleType) -> None:
    wrong: list[Any] = []

    def work(number: int) -> None:
        for turn in range(20):
            to = (number + turn) % hvd.size()
            tensor = torch.full((number + 1000,), float(turn))
            if not torch.equal(rpc.rpc_sync(to, torch.add, (tensor, number)), tensor + number):
                wrong.append((number, turn))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_worker_that_is_busy_elsewhere_serves(hvd: ModuleType, rpc: ModuleType, peer: int, name: str) -> None:
    # The main thread of every rank makes no call: it waits for something that only a served request brings about.
    caller = threading.Thread(target=lambda: rpc.rpc_sync(peer, open_door, (f"{name[: name.rindex(' ')]} of {peer}",)))
    caller.start()
    mine = door(f"{name[: name.rindex(' ')]} of {hvd.rank()}")
    end = time.monotonic() + 60
    while not mine.is_set():
        torch.ones(1000).sum()
        assert time.monotonic() < end
    caller.join()


def test_calls_of_both_directions_at_once(hvd: ModuleType, rpc: ModuleType) -> None:
    tensor = torch.arange(200_000.0)
    futures = [rpc.rpc_async(to, torch.neg, (tensor,)) for to in range(hvd.size()) for _ in range(3)]
    assert all(torch.equal(result, -tensor) for result in torch.futures.wait_all(futures))
