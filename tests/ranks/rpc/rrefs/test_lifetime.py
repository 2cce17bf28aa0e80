"""Values are freed when nobody has an RRef of them, and not before."""

import gc
import sys
import threading
import time
import weakref
from types import ModuleType
from typing import Any

import pytest
import torch
from support.rpc.doors import open_door, pass_door
from support.rpc.values import (
    Tracked,
    fetch,
    give_back,
    is_freed,
    keep,
    let_go,
    live,
    make_local,
    make_on,
    wait_until_freed,
)

import hvlike.rpc


class Node:
    """Part of a reference cycle."""

    other: Any
    rref: Any


def wait_until_table_is_empty() -> None:
    deadline = time.monotonic() + 20
    while live() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert live() == []


def slow_rref(door: str, value: Any) -> Any:
    """An RRef of this worker, later."""
    pass_door(door)
    return hvlike.rpc.RRef(value)


def missing_on_rank_1() -> None:
    """Taken away there by a test."""


def test_the_last_user_frees_the_value(rpc: ModuleType, peer: int, name: str) -> None:
    rref = rpc.remote(peer, Tracked, (name,))
    rref.rpc_sync().__repr__()
    assert not rpc.rpc_sync(peer, is_freed, (name,))
    del rref
    assert rpc.rpc_sync(peer, wait_until_freed, (name,))


def test_one_that_was_never_sent_is_in_no_table(rpc: ModuleType, name: str) -> None:
    rref = rpc.RRef(Tracked(name))
    assert live() == []
    assert rref.owner().name
    del rref
    assert is_freed(name)


@pytest.mark.mpi(min_size=2)
def test_the_owner_keeps_what_others_hold(rpc: ModuleType, peer: int, name: str) -> None:
    rref = rpc.RRef(Tracked(name))
    rpc.rpc_sync(peer, keep, (name, rref))
    del rref
    gc.collect()
    assert not is_freed(name)
    assert len(live()) == 1
    rpc.rpc_sync(peer, let_go, (name,))
    assert wait_until_freed(name)


@pytest.mark.mpi(min_size=2)
def test_others_do_not_take_it_from_the_owner(rpc: ModuleType, peer: int, name: str) -> None:
    rref = rpc.RRef(Tracked(name))
    for _ in range(3):
        rpc.rpc_sync(peer, give_back, (rref,))
    wait_until_table_is_empty()
    assert not is_freed(name)
    # It can be sent again.
    assert rpc.rpc_sync(peer, give_back, (rref,)).local_value() is rref.local_value()


@pytest.mark.mpi(min_size=3)
def test_a_copy_outlives_the_one_it_came_from(rpc: ModuleType, hvd: ModuleType, name: str) -> None:
    owner, user = (hvd.rank() + 1) % hvd.size(), (hvd.rank() + 2) % hvd.size()
    rref = rpc.remote(owner, Tracked, (name,))
    rpc.rpc_async(user, keep, (name, rref))
    # Dropped while the message with its child may still be under way.
    del rref
    deadline = time.monotonic() + 20
    while not rpc.rpc_sync(user, has, (name,)) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not rpc.rpc_sync(owner, is_freed, (name,))
    rpc.rpc_sync(user, let_go, (name,))
    assert rpc.rpc_sync(owner, wait_until_freed, (name,))


def has(name: str) -> bool:
    from support.rpc.values import KEPT

    return name in KEPT


def test_dropped_before_the_function_has_ended(rpc: ModuleType, peer: int, name: str) -> None:
    rref = rpc.remote(peer, pass_door, (name, Tracked("copy")))
    del rref
    rpc.rpc_sync(peer, open_door, (name,))


def test_a_message_that_cannot_be_built_leaves_nothing(rpc: ModuleType, hvd: ModuleType, peer: int) -> None:
    here, there = rpc.RRef(1), rpc.remote(peer, max, (1, 2))
    for to in range(hvd.size()):
        with pytest.raises((AttributeError, TypeError)):
            rpc.rpc_sync(to, give_back, ([here, there, threading.Lock()],))
        with pytest.raises((AttributeError, TypeError)):
            rpc.remote(to, give_back, ([here, there, threading.Lock()],))


@pytest.mark.mpi(min_size=2)
def test_a_message_that_cannot_be_opened_leaves_nothing(
    rpc: ModuleType, hvd: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    if hvd.rank() == 1:
        monkeypatch.delattr(sys.modules[__name__], "missing_on_rank_1")
    hvd.barrier()
    if hvd.rank() == 0:
        for owner in range(hvd.size()):
            rref = rpc.remote(owner, give_back, (owner,))
            with pytest.raises(RuntimeError, match="RPC pickler does not serialize"):
                rpc.rpc_sync(1, missing_on_rank_1, (rref, rpc.RRef(1)))
            # Each is still whole.
            assert rref.to_here() == owner
    hvd.barrier()


@pytest.mark.mpi(min_size=2)
def test_an_answer_that_comes_too_late_leaves_nothing(rpc: ModuleType, peer: int, name: str) -> None:
    with pytest.raises(RuntimeError, match="RPC ran for more than"):
        rpc.rpc_sync(peer, slow_rref, (name, 1), timeout=0.01)
    inner = rpc.remote(peer, slow_rref, (name, 2))
    with pytest.raises(RuntimeError, match="RPC ran for more than"):
        inner.to_here(timeout=0.01)
    rpc.rpc_sync(peer, open_door, (name,))


def test_an_answer_nobody_looks_at_leaves_nothing(rpc: ModuleType, hvd: ModuleType, peer: int) -> None:
    for third in range(hvd.size()):
        rpc.rpc_async(peer, make_on, (third, 1))
        rpc.rpc_async(peer, make_local, (1,))


def test_reference_cycles(rpc: ModuleType, peer: int, name: str) -> None:
    one, two = Node(), Node()
    one.other, two.other = two, one
    one.rref, two.rref = rpc.remote(peer, Tracked, (name,)), rpc.RRef(one)
    rpc.rpc_sync(peer, give_back, (two.rref,))
    node = weakref.ref(one)
    del one, two
    # Garbage only when the other worker's copy is gone, too.
    deadline = time.monotonic() + 20
    while node() is not None and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert rpc.rpc_sync(peer, wait_until_freed, (name,))


def test_garbage_is_collected_in_the_midst_of_calls(rpc: ModuleType, peer: int) -> None:
    threshold = gc.get_threshold()
    gc.set_threshold(3, 2, 2)
    try:
        for number in range(30):
            node = Node()
            node.other = node
            node.rref = rpc.remote(peer, give_back, (number,))
            assert rpc.rpc_sync(peer, fetch, (node.rref,)) == number
    finally:
        gc.set_threshold(*threshold)


def test_values_whose_finaliser_calls_out(rpc: ModuleType, peer: int, name: str) -> None:
    rref = rpc.remote(peer, Caller, (name, peer))
    rref.rpc_sync().__repr__()
    del rref
    assert rpc.rpc_sync(peer, wait_until_freed, (name,))


class Caller(Tracked):
    """A value whose finaliser makes a call that blocks."""

    def __init__(self, name: str, rank: int) -> None:
        super().__init__(name)
        self.rank = rank

    def __del__(self) -> None:
        hvlike.rpc.rpc_sync(self.rank, max, (1, 2))
        super().__del__()


def test_many_at_once_from_many_threads(rpc: ModuleType, hvd: ModuleType, peer: int) -> None:
    results: list[Any] = []

    def use(thread: int) -> None:
        mine = [rpc.remote((peer + number) % hvd.size(), give_back, (thread + number,)) for number in range(50)]
        values = [rref.to_here() for rref in mine]
        sent = [rpc.rpc_async((peer + 1) % hvd.size(), fetch, (rref,)) for rref in mine]
        results.append(values == [future.wait() for future in sent] == [thread + number for number in range(50)])

    threads = [threading.Thread(target=use, args=(1000 * thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 4


def test_two_hundred_open_creations(rpc: ModuleType, peer: int) -> None:
    found = [rpc.remote(peer, torch.full, ((4,), float(number))) for number in range(200)]
    assert [float(rref.to_here()[0]) for rref in found] == [float(number) for number in range(200)]


@pytest.mark.mpi(min_size=2)
def test_who_holds_what_is_known(rpc: ModuleType, hvd: ModuleType, peer: int, name: str) -> None:
    before = (hvd.rank() - 1) % hvd.size()
    rref = rpc.remote(peer, give_back, ([1],))
    rref.to_here()
    hvd.barrier()
    (said,) = live()
    assert "give_back" in said
    assert f"made for worker{before}" in said
    assert f"held by worker{before}" in said
    hvd.barrier()
    del rref
