"""remote(): an RRef at once, the value later; how one gets at the value, what goes wrong with it, what an RRef says."""

import re
import time
from types import ModuleType

import pytest
import torch
from support.rpc.doors import open_door, pass_door, wait_for
from support.rpc.values import Private, fetch, fill, raise_private


def test_it_returns_before_the_function_has_run(rpc: ModuleType, peer: int, name: str) -> None:
    rref = rpc.remote(peer, pass_door, (name, torch.ones(2)))
    assert rref.owner().id == peer
    rpc.rpc_sync(peer, open_door, (name,))
    assert torch.equal(rref.to_here(), torch.ones(2))
    assert rref.confirmed_by_owner() or not rref.is_owner()


@pytest.mark.mpi(min_size=2)
def test_it_is_confirmed_when_the_function_has_ended(rpc: ModuleType, peer: int, name: str) -> None:
    rref = rpc.remote(peer, pass_door, (name,))
    assert not rref.confirmed_by_owner()
    rpc.rpc_sync(peer, open_door, (name,))
    rref._get_future().wait()
    wait_for(rref.confirmed_by_owner)


def test_to_itself_the_owner_has_it_at_once_and_the_value_later(rpc: ModuleType, hvd: ModuleType, name: str) -> None:
    rref = rpc.remote(hvd.rank(), pass_door, (name, [1, 2]))
    assert rref.is_owner()
    assert rref.confirmed_by_owner()
    open_door(name)
    value = rref.local_value()
    assert value == [1, 2]
    assert rref.to_here() is value


@pytest.mark.parametrize("to_self", [False, True])
def test_a_failed_creation_raises_the_original_class_at_every_use(
    rpc: ModuleType, hvd: ModuleType, peer: int, to_self: bool
) -> None:
    rref = rpc.remote(hvd.rank() if to_self else peer, raise_private)
    for _ in range(2):
        with pytest.raises(Private, match=r"On WorkerInfo\(id=\d+, name=worker\d+\):\nPrivate\('line one\nline two'\)"):
            rref.to_here()
    with pytest.raises(RuntimeError, match="Private"):
        rref.rpc_sync().read()
    with pytest.raises(RuntimeError, match="Private"):
        rref.rpc_async().read().wait()
    if rref.is_owner():
        with pytest.raises(Private, match="line one"):
            rref.local_value()


def test_a_failed_creation_can_be_sent_and_fails_where_it_is_used(rpc: ModuleType, peer: int) -> None:
    rref = rpc.remote(peer, raise_private)
    with pytest.raises(RuntimeError, match="Private"):
        rpc.rpc_sync(peer, fetch, (rref,))


@pytest.mark.parametrize("to_self", [False, True])
def test_a_creation_that_was_not_acknowledged_in_time(
    rpc: ModuleType, hvd: ModuleType, peer: int, name: str, to_self: bool
) -> None:
    to = hvd.rank() if to_self else peer
    rref = rpc.remote(to, pass_door, (name, 1), timeout=0.01)
    with pytest.raises(RuntimeError, match="RPC ran for more than"):
        rref._get_future().wait()
    with pytest.raises(RuntimeError, match=r"RRef creation via rpc\.remote\(\) timed out, "):
        rref.to_here()
    with pytest.raises(RuntimeError, match=r"RRef creation via rpc\.remote\(\) timed out, "):
        rpc.rpc_sync(peer, fetch, (rref,))
    with pytest.raises(RuntimeError, match=r"RRef creation via rpc\.remote\(\) timed out, "):
        rref.rpc_sync().bit_length()
    rpc.rpc_sync(to, open_door, (name,))


def test_no_time_limit_and_the_default_one(rpc: ModuleType, peer: int, name: str) -> None:
    unlimited = rpc.remote(peer, pass_door, (name, 1), timeout=0)
    default = rpc.remote(peer, pass_door, (name, 2))
    time.sleep(0.02)
    rpc.rpc_sync(peer, open_door, (name,))
    assert (unlimited.to_here(), default.to_here()) == (1, 2)


def test_a_future_only_where_there_is_a_creation(rpc: ModuleType, peer: int) -> None:
    rref = rpc.remote(peer, max, (1, 2))
    rref.to_here()
    assert isinstance(rref._get_future(), torch._C.Future)
    with pytest.raises(RuntimeError, match="not created by remote"):
        rpc.RRef(1)._get_future()


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


def test_it_is_generic_and_type_hints_are_for_script_modules(rpc: ModuleType) -> None:
    assert rpc.RRef[int](3).to_here() == 3
    assert rpc.RRef(3, type_hint=None).to_here() == 3
    with pytest.raises(RuntimeError, match="type_hint should only be specified"):
        rpc.RRef(3, type_hint=int)


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


def test_without_a_context_it_is_ordinary_autograd(rpc: ModuleType) -> None:
    leaf = torch.ones(3, requires_grad=True)
    rref = rpc.RRef((leaf * 2).sum())
    rref.backward(retain_graph=True)
    rref.backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, torch.full((3,), 4.0))
    square = rpc.RRef((leaf**2).sum())
    square.backward()
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        square.backward()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("text", "RRef should contain a tensor for .backward()"),
        (torch.ones(3), "does not require grad and does not have a grad_fn"),
        (torch.ones(3, requires_grad=True), "grad can be implicitly created only for scalar outputs"),
    ],
)
def test_what_the_owner_cannot_do(rpc: ModuleType, value: object, said: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        rpc.RRef(value).backward()
    assert said in str(caught.value)


@pytest.mark.mpi(min_size=2)
def test_users_need_a_context(rpc: ModuleType, peer: int) -> None:
    rref = rpc.remote(peer, torch.ones, (1,))
    with pytest.raises(RuntimeError, match="User RRefs require 'dist_autograd_ctx_id' to be specified"):
        rref.backward()


def test_an_unknown_context(rpc: ModuleType, peer: int) -> None:
    for rref in (rpc.RRef(torch.ones(1)), rpc.remote(peer, torch.ones, (1,))):
        with pytest.raises(RuntimeError, match="Could not find autograd context with id: 100"):
            rref.backward(100)
