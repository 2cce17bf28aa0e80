"""What goes wrong in a backward: the root hears of it, with the way it has taken, and everything can go on."""

from __future__ import annotations

import threading
from types import ModuleType
from typing import Any

import pytest
import torch
from support.autograd.backward_functions import call_on, failing, let_fail, square, twice, waiting
from support.rpc.doors import open_door

from hvlike.autograd.backward import BACKWARD_MESSAGE
from hvlike.rpc.agent.agent import current_agent

MODES = ["fast", "safe", "smart"]


def prefix(*ranks: int) -> str:
    return "^" + "".join(f"Error on Node {rank}: " for rank in ranks)


@pytest.mark.parametrize("mode", MODES)
def test_an_error_in_a_function_of_this_worker(
    hvd: ModuleType, rpc: ModuleType, autograd: ModuleType, peer: int, mode: str
) -> None:
    leaf = torch.ones(2, requires_grad=True)
    with autograd.context() as context:
        root = failing(rpc.rpc_sync(peer, twice, (leaf,))).sum()
        with pytest.raises(RuntimeError, match=prefix(hvd.rank()) + "Simulate error on backward pass") as caught:
            autograd.backward(context, [root], mode=mode)
        assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("mode", MODES)
def test_an_error_on_another_worker_comes_with_its_rank(
    hvd: ModuleType, rpc: ModuleType, autograd: ModuleType, peer: int, mode: str
) -> None:
    leaf = torch.ones(2, requires_grad=True)
    with autograd.context() as context:
        root = rpc.rpc_sync(peer, failing, (leaf,)).sum()
        with pytest.raises(RuntimeError, match=prefix(hvd.rank(), peer) + "Simulate error on backward pass"):
            autograd.backward(context, [root], mode=mode)


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("mode", MODES)
def test_an_error_two_workers_away_comes_with_both_ranks(
    hvd: ModuleType, rpc: ModuleType, autograd: ModuleType, peer: int, mode: str
) -> None:
    leaf = torch.ones(2, requires_grad=True)
    last = (peer + 1) % hvd.size()
    with autograd.context() as context:
        root = rpc.rpc_sync(peer, call_on, ([last], failing, leaf)).sum()
        with pytest.raises(RuntimeError, match=prefix(hvd.rank(), peer, last) + "Simulate error on backward pass"):
            autograd.backward(context, [root], mode=mode)


@pytest.mark.parametrize("mode", MODES)
def test_fifty_that_fail_and_fifty_that_do_not_over_one_graph(
    hvd: ModuleType, rpc: ModuleType, autograd: ModuleType, peer: int, mode: str
) -> None:
    leaf = torch.ones(2, requires_grad=True)
    with autograd.context() as context:
        value = rpc.rpc_sync(peer, failing_for, (hvd.rank(), rpc.rpc_sync(peer, square, (leaf,))))
        root = rpc.rpc_sync(peer, twice, (value,)).sum()
        for _ in range(50):
            with pytest.raises(RuntimeError, match=r"Error on Node \d+: Simulate error"):
                autograd.backward(context, [root], retain_graph=True, mode=mode)
        assert leaf not in autograd.get_gradients(context)
        rpc.rpc_sync(peer, stop_failing_for, (hvd.rank(),))
        for _ in range(50):
            autograd.backward(context, [root], retain_graph=True, mode=mode)
        assert autograd.get_gradients(context)[leaf].tolist() == [200, 200]
    rpc.rpc_sync(peer, fail_for_again, (hvd.rank(),))


_not_failing_for: set[int] = set()


class _FailingFor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rank: int, value: torch.Tensor) -> torch.Tensor:
        ctx.rank = rank
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        if ctx.rank not in _not_failing_for:
            raise ValueError("Simulate error")
        return None, gradient


def failing_for(rank: int, value: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _FailingFor.apply(rank, value)
    return result


def stop_failing_for(rank: int) -> None:
    _not_failing_for.add(rank)


def fail_for_again(rank: int) -> None:
    _not_failing_for.discard(rank)


@pytest.mark.parametrize("mode", MODES)
def test_a_graph_that_was_freed(hvd: ModuleType, rpc: ModuleType, autograd: ModuleType, peer: int, mode: str) -> None:
    leaf = torch.ones(2, requires_grad=True)
    with autograd.context() as context:
        root = rpc.rpc_sync(peer, square, (leaf,)).sum()
        autograd.backward(context, [root], mode=mode)
        with pytest.raises(RuntimeError, match=r"Error on Node .*Trying to backward through the graph a second time"):
            autograd.backward(context, [root], mode=mode)
        # A new graph in the same context.
        autograd.backward(context, [rpc.rpc_sync(peer, square, (leaf,)).sum()], mode="smart")
        assert autograd.get_gradients(context)[leaf].tolist() == [4, 4]


def test_an_error_in_a_hook(hvd: ModuleType, rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    def hook(gradient: torch.Tensor) -> None:
        raise KeyError("hooked")

    leaf = torch.ones(2, requires_grad=True)
    leaf.register_hook(hook)
    with autograd.context() as context:
        root = rpc.rpc_sync(peer, square, (leaf,)).sum()
        with pytest.raises(RuntimeError, match=prefix(hvd.rank()) + "'hooked'"):
            autograd.backward(context, [root])


def test_one_backward_that_fails_does_not_disturb_another(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    leaf = torch.ones(2, requires_grad=True)
    with autograd.context() as context:
        bad = rpc.rpc_sync(peer, failing, (leaf,)).sum()
        good = rpc.rpc_sync(peer, square, (leaf,)).sum()
        for _ in range(3):
            with pytest.raises(RuntimeError, match="Simulate error"):
                autograd.backward(context, [bad], retain_graph=True)
            autograd.backward(context, [good], retain_graph=True)
        assert autograd.get_gradients(context)[leaf].tolist() == [6, 6]


def test_the_context_is_released_while_a_backward_waits(
    hvd: ModuleType, rpc: ModuleType, autograd: ModuleType, peer: int
) -> None:
    door = f"released {hvd.rank()}"
    leaf = torch.ones(2, requires_grad=True)
    errors: list[Exception] = []

    def run(context: int, root: torch.Tensor) -> None:
        try:
            autograd.backward(context, [root])
        except RuntimeError as error:
            errors.append(error)

    with autograd.context() as context:
        root = rpc.rpc_sync(peer, waiting, (leaf, door)).sum()
        thread = threading.Thread(target=run, args=(context, root))
        thread.start()
        rpc.rpc_sync(peer, wait_for_runs, (context,))
    if peer == hvd.rank():
        # Its engine stands at the door in that thread itself.
        open_door(door)
    thread.join()
    rpc.rpc_sync(peer, open_door, (door,))
    assert peer == hvd.rank() or f"Could not find autograd context with id: {context}" in str(errors[0])


def wait_for_runs(context: int) -> None:
    """Return when a backward of the context runs on this worker."""
    from hvlike.autograd.contexts import contexts

    while not contexts.find(context).backwards:
        threading.Event().wait(1e-3)


def ignore_backwards() -> None:
    """This worker takes no part in backwards until the end of the session, and nobody knows."""
    current_agent().hear(BACKWARD_MESSAGE, lambda source, wire, storages: None)


@pytest.mark.mpi(min_size=2)
def test_a_worker_that_does_not_answer_is_named_in_time(
    hvd: ModuleType, rpc: ModuleType, autograd: ModuleType, peer: int
) -> None:
    leaf = torch.ones(2, requires_grad=True)
    with autograd.context() as context:
        root = rpc.rpc_sync(peer, square, (leaf,)).sum()
        if hvd.rank() == 0:
            rpc.rpc_sync(peer, ignore_backwards)
            rpc._set_rpc_timeout(0.2)
            with pytest.raises(RuntimeError, match=rf"RPC ran for more than .*200 ms.*worker{peer} \(rank {peer}\)"):
                autograd.backward(context, [root])
            rpc._set_rpc_timeout(60)
            assert autograd.get_gradients(context) == {}


@pytest.mark.mpi(min_size=2)
def test_a_backward_that_hangs_in_a_thread_does_not_keep_the_session_from_its_end(
    hvd: ModuleType, rpc: ModuleType, autograd: ModuleType, peer: int
) -> None:
    leaf = torch.ones(2, requires_grad=True)
    errors: list[Exception] = []

    def hang() -> None:
        try:
            with autograd.context() as context:
                root = rpc.rpc_sync(peer, square, (leaf,)).sum()
                ready.set()
                autograd.backward(context, [root])
        except RuntimeError as error:
            errors.append(error)

    if hvd.rank() == 0:
        rpc._set_rpc_timeout(0)
        rpc.rpc_sync(peer, ignore_backwards)
        ready = threading.Event()
        thread = threading.Thread(target=hang, daemon=True)
        thread.start()
        assert ready.wait(60)
    rpc.shutdown(timeout=60)
    if hvd.rank() == 0:
        thread.join()
        assert "RPC has been shut down" in str(errors[0])


def test_errors_stop_when_their_cause_does(hvd: ModuleType, rpc: ModuleType, autograd: ModuleType) -> None:
    leaf = torch.ones(2, requires_grad=True)
    with autograd.context() as context:
        root = rpc.rpc_sync(hvd.rank(), failing, (leaf,)).sum()
        with pytest.raises(RuntimeError, match=prefix(hvd.rank()) + "Simulate error"):
            autograd.backward(context, [root], retain_graph=True)
        let_fail(False)
        try:
            autograd.backward(context, [root])
        finally:
            let_fail(True)
        assert autograd.get_gradients(context)[leaf].tolist() == [1, 1]
