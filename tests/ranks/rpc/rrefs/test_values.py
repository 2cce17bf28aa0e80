"""What an RRef says of itself, and how one gets at the value."""

import re
import time
from types import ModuleType

import pytest
import torch
from support.rpc.doors import open_door, pass_door
from support.rpc.values import fill, give_back, keep, kept, let_go


def test_the_owner_gets_the_object_itself(rpc: ModuleType) -> None:
    value = [torch.ones(2)]
    rref = rpc.RRef(value)
    assert rref.local_value() is value
    assert rref.to_here() is value
    assert rref.to_here(timeout=1) is value


@pytest.mark.mpi(min_size=2)
def test_a_user_gets_a_new_copy_each_time_and_sees_later_changes(rpc: ModuleType, peer: int) -> None:
    rref = rpc.remote(peer, torch.zeros, (3,))
    first, second = rref.to_here(), rref.to_here()
    assert first is not second
    first.fill_(9)
    assert torch.equal(rref.to_here(), torch.zeros(3))
    rpc.rpc_sync(peer, fill, (rref, 4.0))
    assert torch.equal(rref.to_here(), torch.full((3,), 4.0))
    assert torch.equal(second, torch.zeros(3))


@pytest.mark.mpi(min_size=2)
def test_the_value_itself_is_refused_to_users(rpc: ModuleType, peer: int) -> None:
    rref = rpc.remote(peer, max, (1, 2))
    me, owner = rpc.get_worker_info(), rpc.get_worker_info(f"worker{peer}")
    with pytest.raises(RuntimeError) as caught:
        rref.local_value()
    said = str(caught.value)
    assert "can't call localValue() on user " + str(me) in said
    assert f"Call it on owner {owner}" in said
    assert said.startswith("For UserRRef(rref_id=GloballyUniqueId(created_on=")


def test_who_owns_it(rpc: ModuleType, hvd: ModuleType, peer: int) -> None:
    here, there = rpc.RRef(1), rpc.remote(peer, max, (1, 2))
    other = rpc.remote(peer, max, (3, 4))
    assert here.is_owner()
    assert here.confirmed_by_owner()
    assert there.is_owner() == (peer == hvd.rank())
    assert (here.owner_name(), there.owner_name()) == (f"worker{hvd.rank()}", f"worker{peer}")
    assert here.owner() == rpc.get_worker_info()
    assert there.owner() == other.owner()
    assert hash(there.owner()) == hash(other.owner())
    assert here.owner() != 23
    if peer != hvd.rank():
        assert here.owner() != there.owner()
    table = {here.owner(): here, there.owner(): there}
    assert table[other.owner()] is there


def test_how_it_is_shown(rpc: ModuleType, hvd: ModuleType, peer: int) -> None:
    here = rpc.RRef(1)
    unique = rf"GloballyUniqueId\(created_on={hvd.rank()}, local_id=\d+\)"
    assert re.fullmatch(rf"OwnerRRef\({unique}\)", str(here))
    assert repr(here) == str(here)
    there = rpc.remote(peer, max, (1, 2))
    shape = rf"OwnerRRef\({unique}\)" if there.is_owner() else rf"UserRRef\(RRefId = {unique}, ForkId = {unique}\)"
    assert re.fullmatch(shape, str(there))


def test_it_is_generic(rpc: ModuleType) -> None:
    assert rpc.RRef[int](3).to_here() == 3


def test_type_hints_are_for_script_modules(rpc: ModuleType) -> None:
    assert rpc.RRef(3, type_hint=None).to_here() == 3
    with pytest.raises(RuntimeError, match="type_hint should only be specified"):
        rpc.RRef(3, type_hint=int)


@pytest.mark.mpi(min_size=2)
def test_time_limits_of_fetches(rpc: ModuleType, peer: int, name: str) -> None:
    rref = rpc.remote(peer, pass_door, (name, "value"))
    for seconds in (0.001, 0.02):
        with pytest.raises(RuntimeError, match="RPC ran for more than"):
            rref.to_here(timeout=seconds)
    rpc.rpc_sync(peer, open_door, (name,))
    assert rref.to_here() == "value"
    assert rref.to_here(timeout=0) == "value"


def test_time_limit_of_the_owner_itself(rpc: ModuleType, hvd: ModuleType, name: str) -> None:
    rref = rpc.remote(hvd.rank(), pass_door, (name, "value"))
    with pytest.raises(RuntimeError, match="RPC ran for more than"):
        rref.to_here(timeout=0.01)
    open_door(name)
    assert rref.to_here(timeout=20) == "value"


@pytest.mark.mpi(min_size=2)
def test_fetches_of_a_value_to_come_hold_no_thread(rpc: ModuleType, peer: int, name: str) -> None:
    rref = rpc.remote(peer, pass_door, (name, "value"))
    for _ in range(40):
        with pytest.raises(RuntimeError, match="RPC ran for more than"):
            rref.to_here(timeout=0.001)
    # With 16 threads for functions, 40 that wait would let nobody through.
    rpc.rpc_sync(peer, open_door, (name,), timeout=20)
    assert rref.to_here(timeout=20) == "value"


def test_the_value_may_be_none(rpc: ModuleType, peer: int) -> None:
    assert rpc.remote(peer, give_back, (None,)).to_here() is None


def test_a_pending_value_is_not_lost_when_nobody_waits(rpc: ModuleType, peer: int, name: str) -> None:
    rpc.remote(peer, keep, (name, 1))
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            assert rpc.rpc_sync(peer, kept, (name,)) == 1
            break
        except RuntimeError:
            time.sleep(0.002)
    rpc.rpc_sync(peer, let_go, (name,))
