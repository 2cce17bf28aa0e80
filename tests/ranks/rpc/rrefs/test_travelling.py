"""RRefs as arguments and results, and nowhere else."""

import copy
import io
import pickle
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from support.rpc.doors import open_door, pass_door
from support.rpc.values import (
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
    for owner in others(hvd):
        rref = rpc.remote(owner, give_back, (owner,))
        for to in others(hvd):
            assert rpc.rpc_sync(to, fetch, (rref,)) == owner
            assert rpc.rpc_async(to, fetch, (rref,)).wait() == owner
            assert rpc.remote(to, fetch, (rref,)).to_here() == owner


def test_owned_ones_to_every_worker(rpc: ModuleType, hvd: ModuleType) -> None:
    rref = rpc.RRef(torch.ones(3))
    for to in others(hvd):
        assert torch.equal(rpc.rpc_sync(to, fetch, (rref,)), torch.ones(3))


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
