"""remote(): an RRef at once, the value later; what goes wrong stays with the RRef."""

import pickle
import sys
import time
from types import ModuleType
from typing import Any

import pytest
import torch
from support.rpc.doors import await_promise, keep_promise, open_door, pass_door
from support.rpc.values import Counter, Private, fetch, give_back, raise_private, raise_two_arguments, raise_value_error

import hvlike.rpc


def fill_and_return(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.fill_(5)


def missing_on_rank_1() -> None:
    """Taken away there by a test."""


def give_a_future() -> Any:
    return torch.futures.Future()


def give_no_future() -> int:
    return 3


not_a_future = hvlike.rpc.functions.async_execution(give_no_future)


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
    deadline = time.monotonic() + 20
    while not rref.confirmed_by_owner() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert rref.confirmed_by_owner()


def test_to_itself_the_owner_has_it_at_once_and_the_value_later(rpc: ModuleType, hvd: ModuleType, name: str) -> None:
    rref = rpc.remote(hvd.rank(), pass_door, (name, [1, 2]))
    assert rref.is_owner()
    assert rref.confirmed_by_owner()
    open_door(name)
    value = rref.local_value()
    assert value == [1, 2]
    assert rref.to_here() is value


def test_to_itself_arguments_are_copied(rpc: ModuleType, hvd: ModuleType) -> None:
    tensor = torch.zeros(3)
    rref = rpc.remote(hvd.rank(), fill_and_return, (tensor,))
    assert torch.equal(rref.local_value(), torch.full((3,), 5.0))
    assert torch.equal(tensor, torch.zeros(3))


def test_classes_builtins_and_functions_of_torch_make_values(rpc: ModuleType, peer: int) -> None:
    assert rpc.remote(peer, Counter, (3,)).to_here().count == 3
    assert rpc.remote(peer, max, [1, 2]).to_here() == 2
    assert rpc.remote(peer, dict, kwargs={"one": 1}).to_here() == {"one": 1}
    assert rpc.remote(peer, dict).to_here() == {}
    assert torch.equal(rpc.remote(peer, torch.add, (torch.ones(2), 1)).to_here(), torch.full((2,), 2.0))


def test_workers_by_name_rank_and_info(rpc: ModuleType, peer: int) -> None:
    info = rpc.get_worker_info(f"worker{peer}")
    for to in (peer, info, info.name):
        assert rpc.remote(to, max, (1, 2)).owner() == info
    with pytest.raises(RuntimeError, match="could not find destination"):
        rpc.remote("nobody", max, (1, 2))


def test_wrong_arguments_are_refused_at_the_call(rpc: ModuleType, peer: int) -> None:
    with pytest.raises(TypeError, match=r"function should be callable\."):
        rpc.remote(peer, 3)
    with pytest.raises((AttributeError, pickle.PicklingError), match="local object"):
        rpc.remote(peer, lambda: 1)
    with pytest.raises(RuntimeError, match=r"Can not pickle torch\.futures\.Future"):
        rpc.remote(peer, max, (torch.futures.Future(), 1))


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


def test_other_classes_of_errors(rpc: ModuleType, peer: int) -> None:
    with pytest.raises(ValueError, match="a wrong value"):
        rpc.remote(peer, raise_value_error).to_here()
    with pytest.raises(RuntimeError, match=r"(?s)TwoArguments.*Original exception on remote side was"):
        rpc.remote(peer, raise_two_arguments).to_here()
    with pytest.raises(TypeError):
        rpc.remote(peer, give_back).to_here()


def test_a_failed_creation_can_be_sent_and_fails_where_it_is_used(rpc: ModuleType, peer: int) -> None:
    rref = rpc.remote(peer, raise_private)
    with pytest.raises(RuntimeError, match="Private"):
        rpc.rpc_sync(peer, fetch, (rref,))


@pytest.mark.mpi(min_size=2)
def test_a_missing_function_fails_the_creation(
    rpc: ModuleType, hvd: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    if hvd.rank() == 1:
        monkeypatch.delattr(sys.modules[__name__], "missing_on_rank_1")
    hvd.barrier()
    if hvd.rank() == 0:
        rref = rpc.remote(1, missing_on_rank_1)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="RPC pickler does not serialize"):
                rref.to_here()
    hvd.barrier()


def test_a_value_that_cannot_be_sent_is_an_error_of_the_fetch_alone(rpc: ModuleType, peer: int) -> None:
    future = rpc.remote(peer, give_a_future)
    if not future.is_owner():
        with pytest.raises(RuntimeError, match=r"Can not pickle torch\.futures\.Future"):
            future.to_here()
    assert rpc.remote(peer, max, (1, 2)).to_here() == 2


def test_functions_that_answer_later(rpc: ModuleType, peer: int, name: str) -> None:
    rref = rpc.remote(peer, await_promise, (name,))
    rpc.rpc_sync(peer, keep_promise, (name, "kept"))
    assert rref.to_here() == "kept"
    wrong = rpc.remote(peer, not_a_future)
    with pytest.raises(RuntimeError, match=r"must return a torch\.futures\.Future object"):
        wrong.to_here()


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
