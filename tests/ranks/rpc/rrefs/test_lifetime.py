"""Values are freed when nobody has an RRef of them, and not before; RRefs after the end of their session."""

import gc
import sys
import threading
import weakref
from types import ModuleType
from typing import Any

import pytest
import torch
from support.rpc.doors import open_door, pass_door, wait_for
from support.rpc.values import (
    Tracked,
    give_back,
    is_freed,
    is_kept,
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
    wait_for(lambda: live() == [])
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
    wait_for(lambda: rpc.rpc_sync(user, is_kept, (name,)))
    assert not rpc.rpc_sync(owner, is_freed, (name,))
    rpc.rpc_sync(user, let_go, (name,))
    assert rpc.rpc_sync(owner, wait_until_freed, (name,))


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
    wait_for(lambda: gc.collect() >= 0 and node() is None)
    assert rpc.rpc_sync(peer, wait_until_freed, (name,))


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


NOT_SET = r"Current RPC agent is not set! Did you initialize the RPC framework \(e\.g\. by calling `rpc\.init_rpc`\)\?"


@pytest.fixture
def session(rpc: ModuleType, hvd: ModuleType) -> Any:
    """Ends the session that the test runs in, and the next one begins."""

    def renew() -> None:
        rpc.init_rpc(f"worker{hvd.rank()}")

    return renew


def test_users_and_owners_after_shutdown(rpc: ModuleType, hvd: ModuleType, peer: int, session: Any) -> None:
    here, there = rpc.RRef([1]), rpc.remote(peer, torch.ones, (2,))
    sent = rpc.RRef(2)
    rpc.rpc_sync(peer, give_back, (sent,))
    rpc.shutdown()
    if not there.is_owner():
        with pytest.raises(RuntimeError, match=r"Cannot call to_here\(\) on it after deletion\."):
            there.to_here()
    assert here.local_value() == [1]
    with pytest.raises(RuntimeError, match="RPC has not been initialized"):
        there.rpc_sync().size()
    with pytest.raises(RuntimeError, match="RPC has not been initialized"):
        rpc.remote(peer, torch.ones, (2,))
    with pytest.raises(RuntimeError, match=NOT_SET):
        rpc.RRef(1)
    assert there.owner_name() == f"worker{peer}"
    assert str(there)
    session()
    # Those of an earlier session stay dead in the next one.
    if not there.is_owner():
        with pytest.raises(RuntimeError, match=r"Cannot call to_here\(\) on it after deletion\."):
            there.to_here()
    with pytest.raises(RuntimeError, match=r"Cannot call fork an UserRRef after deletion\."):
        rpc.rpc_sync(peer, give_back, (there,))
    del there
    assert rpc.remote(peer, max, (1, 2)).to_here() == 2


@pytest.mark.mpi(min_size=2)
def test_shutdown_frees_what_is_still_held(
    rpc: ModuleType, hvd: ModuleType, peer: int, name: str, session: Any
) -> None:
    held = rpc.remote(peer, Tracked, (name,))
    cycle: list[Any] = [rpc.remote(peer, Tracked, (name + " in a cycle",))]
    cycle.append(cycle)
    del cycle
    rpc.rpc_sync(peer, keep, (name, rpc.RRef(Tracked(name + " kept"))))
    rpc.shutdown()
    for tracked in (name, name + " in a cycle"):
        assert wait_until_freed(tracked.replace(f" {hvd.rank()}", f" {(hvd.rank() - 1) % hvd.size()}"))
    session()
    rpc.rpc_sync(peer, let_go, (name,))
    if held.is_owner():
        assert isinstance(held.local_value(), Tracked)
    gc.collect()


def test_leaks_are_named_where_they_are_looked_for(
    rpc: ModuleType, hvd: ModuleType, peer: int, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hvlike.rpc.rrefs.lifetime import Lifetime
    from hvlike.rpc.rrefs.session import checks_leaks

    rref = rpc.remote(peer, give_back, ([1],))
    rref.to_here()
    hvd.barrier()
    assert checks_leaks()
    monkeypatch.setattr(Lifetime, "drop_all", lambda lifetime: None)
    if rref.is_owner():
        rpc.shutdown()
    else:
        with pytest.raises(RuntimeError, match=r"(?s)Leaking RRef.*give_back.*held by worker"):
            rpc.shutdown()
    monkeypatch.undo()
    session()
