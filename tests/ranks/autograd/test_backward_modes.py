"""What is sent and not used: "safe" and "smart" complete, "fast" names the call."""

from __future__ import annotations

import threading
import time
from types import ModuleType

import pytest
import torch
from support.autograd.backward_functions import gradient_of_weight, nothing, square, times_weight, twice
from support.rpc.doors import open_door, pass_door

from hvlike.rpc.agent.agent import current_agent

COMPLETE = ["safe", "smart"]


@pytest.mark.parametrize("mode", COMPLETE)
def test_a_result_that_is_not_used(rpc: ModuleType, autograd: ModuleType, peer: int, mode: str) -> None:
    leaf = torch.full((2,), 3.0, requires_grad=True)
    with autograd.context() as context:
        used = rpc.rpc_sync(peer, square, (leaf,))
        rpc.rpc_sync(peer, twice, (leaf,))
        autograd.backward(context, [used.sum()], mode=mode)
        assert autograd.get_gradients(context)[leaf].tolist() == [6, 6]


@pytest.mark.parametrize("mode", COMPLETE)
def test_many_results_that_are_not_used(rpc: ModuleType, autograd: ModuleType, peer: int, mode: str) -> None:
    leaf = torch.full((2,), 3.0, requires_grad=True)
    with autograd.context() as context:
        value = leaf
        for _ in range(10):
            value = rpc.rpc_sync(peer, square, (value,))
            rpc.rpc_async(peer, twice, (leaf,)).wait()
        autograd.backward(context, [(rpc.rpc_sync(peer, twice, (leaf,)) * leaf).sum()], mode=mode)
        assert autograd.get_gradients(context)[leaf].tolist() == [12, 12]


@pytest.mark.parametrize("mode", COMPLETE)
def test_a_call_that_returns_no_tensor(rpc: ModuleType, autograd: ModuleType, peer: int, mode: str) -> None:
    leaf = torch.ones(2, requires_grad=True)
    with autograd.context() as context:
        # Nothing but the argument tells the callee of this context.
        rpc.rpc_sync(peer, nothing, (leaf,))
        autograd.backward(context, [(leaf * 4).sum()], mode=mode)
        assert autograd.get_gradients(context)[leaf].tolist() == [4, 4]


@pytest.mark.parametrize("mode", COMPLETE)
def test_a_call_that_has_not_been_opened_yet(
    hvd: ModuleType, rpc: ModuleType, autograd: ModuleType, peer: int, mode: str
) -> None:
    door = f"late {mode} {hvd.rank()}"
    leaf = torch.ones(2, requires_grad=True)
    rpc.rpc_sync(peer, open_when_crowded, (door,))
    with autograd.context() as context:
        # More than there are threads: the last ones are opened while, or after, the backward asks for them.
        calls = [rpc.rpc_async(peer, pass_door, (door, leaf)) for _ in range(20)]
        autograd.backward(context, [(leaf * 4).sum()], mode=mode)
        assert autograd.get_gradients(context)[leaf].tolist() == [4, 4]
        results = torch.futures.wait_all(calls)
        # What has come back since does not keep the next one from its end.
        autograd.backward(context, [(results[0] * 2).sum()], mode=mode)
        assert autograd.get_gradients(context)[leaf].tolist() == [6, 6]


def open_when_crowded(door: str) -> None:
    """Open the door when calls wait for a thread because all of them stand at it."""
    thread_pool = current_agent().fabric.loop.thread_pool

    def wait() -> None:
        while not thread_pool.queued:
            time.sleep(1e-3)
        open_door(door)

    threading.Thread(target=wait, daemon=True).start()


def test_fast_names_the_call_whose_result_is_not_used(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    leaf = torch.ones(2, requires_grad=True)
    with autograd.context() as context:
        used = rpc.rpc_sync(peer, square, (leaf,))
        rpc.rpc_sync(peer, torch.mul, (leaf, 2))
        with pytest.raises(RuntimeError, match=rf'mode="fast" .* of the call aten::mul, what rank {peer} has sent'):
            autograd.backward(context, [used.sum()], retain_graph=True, mode="fast")
        # It goes on in another mode, over the same graph.
        autograd.backward(context, [used.sum()])
        assert leaf in autograd.get_gradients(context)


def test_fast_names_a_call_that_returns_no_tensor(
    hvd: ModuleType, rpc: ModuleType, autograd: ModuleType, peer: int
) -> None:
    leaf = torch.ones(2, requires_grad=True)
    with autograd.context() as context:
        rpc.rpc_sync(peer, nothing, (leaf,))
        with pytest.raises(RuntimeError, match=f"of the call nothing, what rank {hvd.rank()} has sent to rank {peer}"):
            autograd.backward(context, [(leaf * 4).sum()], mode="fast")


def test_a_second_independent_root_is_left_out(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    name = f"left out {rpc.get_worker_info().id}"
    leaf = torch.ones(2, requires_grad=True)
    with autograd.context() as context:
        roots = [rpc.rpc_sync(peer, times_weight, (f"{name} {number}", leaf)).sum() for number in range(2)]
        with pytest.raises(RuntimeError, match="of the call times_weight"):
            autograd.backward(context, roots[:1], retain_graph=True, mode="fast")
        autograd.backward(context, roots[:1], mode="smart")
        assert rpc.rpc_sync(peer, gradient_of_weight, (context, f"{name} 0")) is not None
        assert rpc.rpc_sync(peer, gradient_of_weight, (context, f"{name} 1")) is None
