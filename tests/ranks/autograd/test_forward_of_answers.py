"""Results in a context: what of them is attached to the worker that they come from."""

import threading
from types import ModuleType
from typing import Any

import pytest
import torch
from support.autograd.sights import in_another_thread, is_attached, recvs, sends
from support.rpc.doors import await_promise, keep_promise, open_door, pass_door
from torch import Tensor, nn

import hvlike.autograd
import hvlike.rpc
from hvlike.rpc.functions import async_execution
from hvlike.rpc.wire.autograd_hooks import this_thread

WEIGHT = torch.ones(2, requires_grad=True)


def of_own_leaves() -> Tensor:
    """No argument requires grad, the result does."""
    return WEIGHT * 2


def own_leaf() -> Tensor:
    return WEIGHT


def mixed(tensor: Tensor) -> dict[str, Any]:
    return {"double": tensor * 2, "constant": torch.ones(1), "own": WEIGHT.sum(), "detached": tensor.detach(), "n": 3}


def wait_and_double(door: str) -> Tensor:
    pass_door(door)
    return of_own_leaves()


def double_without_grad(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor * 2


def own_parameter() -> nn.Parameter:
    return nn.Parameter(torch.ones(2))


@async_execution
def double_later(to: int, tensor: Tensor) -> Any:
    """The result of another worker, changed here in a callback."""
    return hvlike.rpc.rpc_async(to, torch.mul, (tensor, 2)).then(lambda future: future.wait() * 2)


@async_execution
def double_without_grad_later(to: int, tensor: Tensor) -> Any:
    with torch.no_grad():
        return hvlike.rpc.rpc_async(to, torch.mul, (tensor, 2)).then(lambda future: (future.wait() * 2).requires_grad)


class Weighing:
    """A value with methods that return tensors."""

    def __init__(self) -> None:
        self.weight = torch.ones(2, requires_grad=True)

    def weigh(self, tensor: Tensor) -> Tensor:
        return self.weight * tensor

    def read(self) -> Tensor:
        return self.weight


def unsendable() -> Any:
    """Has a tensor that requires grad, and something that cannot be sent."""
    return WEIGHT * 2, threading.Lock()


def test_an_answer_leaves_a_send_there_and_a_recv_here(
    hvd: ModuleType, rpc: ModuleType, autograd: ModuleType, peer: int
) -> None:
    with autograd.context() as context:
        arrived = rpc.rpc_sync(peer, of_own_leaves)
        assert is_attached(arrived)
        came = recvs(context)
        assert list(came.values()) == [(peer, 1)]
        (number,) = came
        assert number >> 48 == peer
        assert rpc.rpc_sync(peer, sends, (context,))[number] == (hvd.rank(), 1)


def test_results_require_grad_because_of_leaves_there(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    with autograd.context():
        for function in (of_own_leaves, own_leaf):
            assert is_attached(rpc.rpc_sync(peer, function))
            assert is_attached(rpc.rpc_async(peer, function).wait())
            rref = rpc.remote(peer, function)
            first, second = rref.to_here(), rref.to_here()
            if peer != rpc.get_worker_info().id:
                assert is_attached(first)
                assert is_attached(second)
                assert first is not second


def test_each_tensor_of_a_result_is_as_it_was_there(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    with autograd.context():
        arrived = rpc.rpc_sync(peer, mixed, (torch.ones(2, requires_grad=True),))
        assert is_attached(arrived["double"])
        assert is_attached(arrived["own"])
        assert arrived["double"].grad_fn is arrived["own"].grad_fn
        assert not arrived["constant"].requires_grad
        assert not arrived["detached"].requires_grad
        assert not rpc.rpc_sync(peer, double_without_grad, (torch.ones(2, requires_grad=True),)).requires_grad


def test_results_outside_of_the_context_are_leaves(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    with autograd.context() as context:
        arrived = in_another_thread(lambda: rpc.rpc_sync(peer, of_own_leaves))
        assert (arrived.requires_grad, arrived.is_leaf) == (True, True)
        assert recvs(context) == {}
    arrived = rpc.rpc_sync(peer, of_own_leaves)
    assert (arrived.requires_grad, arrived.is_leaf) == (True, True)


def test_results_under_no_grad_are_leaves(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    tensor = torch.ones(2, requires_grad=True)
    with autograd.context():
        with torch.no_grad():
            for arrived in (
                rpc.rpc_sync(peer, of_own_leaves),
                rpc.rpc_async(peer, of_own_leaves).wait(),
                rpc.rpc_sync(peer, torch.mul, (tensor, 2)),
            ):
                assert (arrived.requires_grad, arrived.is_leaf) == (True, True)
            rref = rpc.remote(peer, own_leaf)
            assert rref.to_here().is_leaf


def test_callbacks_have_the_grad_mode_of_the_call(
    hvd: ModuleType, rpc: ModuleType, autograd: ModuleType, peer: int
) -> None:
    door = f"grad mode {hvd.rank()}"
    with autograd.context():
        with torch.no_grad():
            future = rpc.rpc_async(peer, wait_and_double, (door,))
            constant = future.then(lambda done: (done.wait().is_leaf, torch.is_grad_enabled()))
        graded = rpc.rpc_async(peer, wait_and_double, (door,)).then(
            lambda done: (is_attached(done.wait()), torch.is_grad_enabled())
        )
        rpc.rpc_sync(peer, open_door, (door,))
        assert constant.wait() == (True, False)
        assert graded.wait() == (True, True)


def test_a_parameter_comes_back_as_an_attached_parameter(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    with autograd.context():
        arrived = rpc.rpc_sync(peer, own_parameter)
        assert type(arrived) is nn.Parameter
        assert is_attached(arrived)
    arrived = rpc.rpc_sync(peer, own_parameter)
    assert type(arrived) is nn.Parameter
    assert arrived.is_leaf


def test_every_fetch_is_a_message_of_its_own(hvd: ModuleType, rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    rref = rpc.remote(peer, own_leaf)
    if hvd.size() == 1:
        assert rref.to_here() is rref.local_value()
        return
    assert rref.to_here().is_leaf
    with autograd.context() as context:
        first, second = rref.to_here(), rref.to_here()
        assert is_attached(first)
        assert first.grad_fn is not second.grad_fn
        assert list(recvs(context).values()) == [(peer, 1), (peer, 1)]


@pytest.mark.mpi(min_size=2)
def test_a_value_that_is_still_made_comes_in_the_context_of_who_fetches_it(
    hvd: ModuleType, rpc: ModuleType, autograd: ModuleType, peer: int
) -> None:
    door = f"made {hvd.rank()}"
    # Made without a context, by a call that is still going on.
    rref = rpc.remote(peer, wait_and_double, (door,))

    def fetch() -> tuple[int, bool, int]:
        with autograd.context() as context:
            arrived = rref.to_here()
            return this_thread.context, is_attached(arrived), len(recvs(context))

    threads: list[threading.Thread] = []
    fetched: list[tuple[int, bool, int]] = []
    for _ in range(2):
        threads.append(threading.Thread(target=lambda: fetched.append(fetch())))
        threads[-1].start()
    plain: list[Tensor] = []
    threads.append(threading.Thread(target=lambda: plain.append(rref.to_here())))
    threads[-1].start()
    with autograd.context():
        # The door is opened in a third context.
        rpc.rpc_sync(peer, open_door, (door,))
    for thread in threads:
        thread.join()
    assert len({context for context, _, _ in fetched}) == 2
    assert [(attached, count) for _, attached, count in fetched] == [(True, 1), (True, 1)]
    assert plain[0].is_leaf


def test_an_answer_that_another_call_completes_is_in_the_context_of_its_own_request(
    hvd: ModuleType, rpc: ModuleType, autograd: ModuleType, peer: int
) -> None:
    promise = f"answers {hvd.rank()}"
    with autograd.context() as context:
        future = rpc.rpc_async(peer, await_promise, (promise,))

        def keep_in_another() -> dict[int, tuple[int, int]]:
            with autograd.context() as another:
                rpc.rpc_sync(peer, keep_promise, (promise, torch.ones(2, requires_grad=True)))
                found: dict[int, tuple[int, int]] = rpc.rpc_sync(peer, sends, (another,))
                return {number: send for number, send in found.items() if number >> 48 == peer != hvd.rank()}

        in_another_thread(keep_in_another)
        assert is_attached(future.wait())
        (number,) = recvs(context)
        assert number in rpc.rpc_sync(peer, sends, (context,))


def test_answers_of_async_functions_are_attached_all_the_way(
    hvd: ModuleType, rpc: ModuleType, autograd: ModuleType, peer: int
) -> None:
    beyond = (peer + 1) % hvd.size()
    tensor = torch.ones(2, requires_grad=True)
    with autograd.context():
        for arrived in (
            rpc.rpc_sync(peer, double_later, (beyond, tensor)),
            rpc.rpc_async(peer, double_later, (beyond, tensor)).wait(),
            rpc.remote(peer, double_later, (beyond, tensor)).to_here(),
        ):
            assert arrived.tolist() == [4.0, 4.0]
            assert arrived.requires_grad
            assert not arrived.is_leaf
        assert rpc.rpc_sync(peer, double_without_grad_later, (beyond, tensor)) is False


def test_results_of_methods_by_an_rref_are_attached(
    hvd: ModuleType, rpc: ModuleType, autograd: ModuleType, peer: int
) -> None:
    rref = rpc.remote(peer, Weighing)
    with autograd.context():
        assert is_attached(rref.rpc_sync().weigh(torch.ones(2)))
        assert is_attached(rref.rpc_async().read().wait())
        if hvd.size() > 1:
            assert is_attached(rref.remote().weigh(torch.ones(2)).to_here())


def test_a_result_that_cannot_be_sent_leaves_nothing(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    with autograd.context() as context:
        with pytest.raises(RuntimeError, match="cannot be sent"):
            rpc.rpc_sync(peer, unsendable)
        assert recvs(context) == {}
        assert rpc.rpc_sync(peer, sends, (context,)) == {}
        assert is_attached(rpc.rpc_sync(peer, of_own_leaves))
