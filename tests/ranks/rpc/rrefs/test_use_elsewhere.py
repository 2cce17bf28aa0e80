"""RRefs elsewhere: they travel as arguments and results, and nowhere else; methods of the value are called there."""

import copy
import io
import pickle
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from support.rpc.doors import open_door, pass_door
from support.rpc.forms import FORMS
from support.rpc.values import (
    Counter,
    Private,
    describe,
    fetch,
    fetch_all,
    forward,
    forward_later,
    give_back,
    is_same,
    keep,
    let_go,
    live,
    make_local,
    make_on,
)


class Pair(NamedTuple):
    """A container."""

    one: Any
    two: Any


def same_twice(pair: list[Any]) -> bool:
    return pair[0] is pair[1]


def add_up(rref: Any, *, other: Any) -> Any:
    return rref.to_here() + other.to_here()


def others(hvd: ModuleType) -> list[int]:
    """All ranks, the next one first."""
    return [(hvd.rank() + step) % hvd.size() for step in range(1, hvd.size() + 1)]


def test_to_every_worker_from_every_owner(rpc: ModuleType, hvd: ModuleType) -> None:
    made = [(owner, rpc.remote(owner, give_back, (owner,))) for owner in others(hvd)]
    for value, rref in [*made, (5, rpc.RRef(5))]:
        for to in others(hvd):
            for form in FORMS.values():
                assert form(to, fetch, (rref,)) == value


def test_in_containers_and_keywords(rpc: ModuleType, hvd: ModuleType, peer: int) -> None:
    here, there = rpc.RRef(1), rpc.remote(peer, give_back, (2,))
    pair = rpc.rpc_sync(peer, give_back, ({"pair": Pair(here, [there])},))["pair"]
    assert (pair.one.to_here(), pair.two[0].to_here()) == (1, 2)
    assert rpc.rpc_sync(peer, add_up, (here,), {"other": there}) == 3
    assert rpc.rpc_sync(peer, fetch_all, ([here, there, here],)) == [1, 2, 1]
    assert rpc.rpc_sync(peer, same_twice, ([there, there],))


def test_it_comes_home_as_the_same_value(rpc: ModuleType, hvd: ModuleType, peer: int, name: str) -> None:
    value = [1]
    rref = rpc.RRef(value)
    back = rpc.rpc_sync(peer, give_back, (rref,))
    assert back.is_owner()
    assert back.local_value() is value
    keep(name, value)
    assert rpc.rpc_sync(peer, rpc.rpc_sync, (hvd.rank(), is_same, (rref, name)))
    let_go(name)


def test_rrefs_of_rrefs(rpc: ModuleType, hvd: ModuleType, peer: int) -> None:
    outer = rpc.RRef(rpc.RRef([rpc.RRef(5)]))
    inner = rpc.rpc_sync(peer, fetch, (outer,))
    assert inner.to_here()[0].to_here() == 5
    remote = rpc.remote(peer, make_on, (others(hvd)[-1], 6))
    assert remote.to_here().to_here() == 6


def test_results_made_by_the_callee_and_by_a_third_worker(rpc: ModuleType, hvd: ModuleType, peer: int) -> None:
    made = rpc.rpc_sync(peer, make_local, (torch.ones(2),))
    assert made.owner().id == peer
    assert torch.equal(made.to_here(), torch.ones(2))
    for third in others(hvd):
        made = rpc.rpc_sync(peer, make_on, (third, third))
        assert made.owner().id == third
        assert made.to_here() == third


def test_along_rings(rpc: ModuleType, hvd: ModuleType) -> None:
    ring = others(hvd) * 3
    assert torch.equal(forward(ring, rpc.RRef(torch.ones(2))), torch.ones(2))
    assert forward(ring, rpc.remote(ring[0], max, (3, 4))) == 4
    futures = [rpc.rpc_async(ring[0], forward_later, (ring, rpc.RRef(number))) for number in range(20)]
    assert [future.wait() for future in futures] == list(range(20))


def test_they_are_confirmed_before_the_function_starts(rpc: ModuleType, hvd: ModuleType) -> None:
    for owner in others(hvd):
        for to in others(hvd):
            for _ in range(5):
                rref = rpc.remote(owner, max, (1, 2))
                assert rpc.rpc_sync(to, describe, (rref,)) == (True, to == owner)
                assert rpc.remote(to, describe, (rref,)).to_here() == (True, to == owner)


def test_confirmed_even_while_the_value_is_still_computed(rpc: ModuleType, hvd: ModuleType, name: str) -> None:
    owner = others(hvd)[0]
    rref = rpc.remote(owner, pass_door, (name, 1))
    for to in others(hvd):
        assert rpc.rpc_sync(to, describe, (rref,), timeout=20) == (True, to == owner)
    rpc.rpc_sync(owner, open_door, (name,))
    assert rref.to_here() == 1


def test_the_owner_sending_to_itself_counts_no_fork(rpc: ModuleType, hvd: ModuleType, name: str) -> None:
    rref = rpc.RRef([name])
    keep(name, rref.local_value())
    for _ in range(3):
        assert rpc.rpc_sync(hvd.rank(), is_same, (rref, name))
    assert live() == []
    let_go(name)


@pytest.mark.parametrize(
    "pickled", [pickle.dumps, copy.copy, copy.deepcopy, lambda rref: torch.save(rref, io.BytesIO())]
)
def test_outside_of_rpc_it_cannot_be_pickled(rpc: ModuleType, peer: int, pickled: Any) -> None:
    said = "Can not pickle rref in python pickler, rref can only be pickled when using RPC"
    for rref in (rpc.RRef(1), rpc.remote(peer, max, (1, 2))):
        with pytest.raises(RuntimeError, match=said):
            pickled(rref)


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
