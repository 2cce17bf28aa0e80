"""What goes wrong in a backward: wrong arguments, errors on its way with their ranks, what is sent and not used."""

from __future__ import annotations

import threading
from types import ModuleType
from typing import Any

import pytest
import torch
from support.autograd.sights import (
    call_on,
    failing,
    gradient_of_weight,
    nothing,
    square,
    times_weight,
    twice,
    waiting,
)
from support.rpc.doors import open_door

from hvlike import autograd as hvlike_autograd
from hvlike.autograd.backward import BACKWARD_MESSAGE
from hvlike.rpc.agent.agent import current_agent

MODES = ["fast", "safe", "smart"]


def prefix(*ranks: int) -> str:
    return "^" + "".join(f"Error on Node {rank}: " for rank in ranks)


@pytest.mark.parametrize("mode", MODES)
def test_an_error_comes_with_the_ranks_on_its_way(
    hvd: ModuleType, rpc: ModuleType, autograd: ModuleType, peer: int, mode: str
) -> None:
    """In a function of this worker, of the next one, and of the one behind that."""

    def hook(gradient: torch.Tensor) -> None:
        raise KeyError("hooked")

    leaf = torch.ones(2, requires_grad=True)
    # A worker that calls itself stands there once.
    ways = [[], [peer], [peer, (peer + 1) % hvd.size()]][: hvd.size()]
    for way in ways:
        # Of its own: an error leaves messages unused.
        with autograd.context() as context:
            value = rpc.rpc_sync(peer, twice, (leaf,))
            root = rpc.rpc_sync(way[0], call_on, (way[1:], failing, value)) if way else failing(value)
            with pytest.raises(RuntimeError, match=prefix(hvd.rank(), *way) + "Simulate error on backward") as caught:
                autograd.backward(context, [root.sum()], mode=mode)
            assert way or isinstance(caught.value.__cause__, ValueError)
    with autograd.context() as context:
        value = rpc.rpc_sync(peer, twice, (leaf,))
        value.register_hook(hook)
        with pytest.raises(RuntimeError, match=prefix(hvd.rank()) + "'hooked'"):
            autograd.backward(context, [(value * 2).sum()], mode=mode)


@pytest.mark.parametrize("mode", MODES)
def test_twenty_that_fail_and_twenty_that_do_not_over_one_graph(
    hvd: ModuleType, rpc: ModuleType, autograd: ModuleType, peer: int, mode: str
) -> None:
    leaf = torch.ones(2, requires_grad=True)
    with autograd.context() as context:
        value = rpc.rpc_sync(peer, failing_for, (hvd.rank(), rpc.rpc_sync(peer, square, (leaf,))))
        root = rpc.rpc_sync(peer, twice, (value,)).sum()
        for _ in range(20):
            with pytest.raises(RuntimeError, match=r"Error on Node \d+: Simulate error"):
                autograd.backward(context, [root], retain_graph=True, mode=mode)
        assert leaf not in autograd.get_gradients(context)
        rpc.rpc_sync(peer, stop_failing_for, (hvd.rank(),))
        for _ in range(20):
            autograd.backward(context, [root], retain_graph=True, mode=mode)
        assert autograd.get_gradients(context)[leaf].tolist() == [80, 80]
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


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda context, root: (None, [root]), TypeError, "incompatible function arguments"),
        (lambda context, root: ("a", [root]), TypeError, "incompatible function arguments"),
        (lambda context, root: (1.0, [root]), TypeError, "incompatible function arguments"),
        (lambda context, root: (context, None), TypeError, "incompatible function arguments"),
        (lambda context, root: (context, root), TypeError, "incompatible function arguments"),
        (lambda context, root: (context, [root, None]), TypeError, "incompatible function arguments"),
        (lambda context, root: (context, "roots"), TypeError, "incompatible function arguments"),
        (lambda context, root: (context, [root], "yes"), TypeError, "incompatible function arguments"),
        (lambda context, root: (context, []), RuntimeError, "No tensors provided for gradient computation"),
        (lambda context, root: (context, [root.detach()]), RuntimeError, "requires_grad not set on"),
        (lambda context, root: (context, [root, torch.ones(3)]), RuntimeError, "requires_grad not set on root 1"),
        (
            lambda context, root: (context, [root.expand(2)]),
            RuntimeError,
            r"shape \[2\].* is not a scalar, all roots need to be scalar",
        ),
        (
            lambda context, root: (context, [torch.ones(1, requires_grad=True)]),
            RuntimeError,
            "does not have a valid gradient function",
        ),
        (lambda context, root: (context + 1, [root]), RuntimeError, "Could not find autograd context with id: "),
        (lambda context, root: (context + 1, []), RuntimeError, "Could not find autograd context with id: "),
        (lambda context, root: (context, [root], False, "quick"), ValueError, "mode must be one of .*'smart'"),
    ],
)
def test_wrong_arguments_are_named(
    rpc: ModuleType, autograd: ModuleType, make: Any, error: type[Exception], text: str
) -> None:
    root = torch.ones(1, requires_grad=True) * 2
    with autograd.context() as context:
        with pytest.raises(error, match=text):
            autograd.backward(*make(context, root))
        # Nothing has happened: the context and the graph are as before.
        assert autograd.get_gradients(context) == {}
        autograd.backward(context, [root])
        assert len(autograd.get_gradients(context)) == 1


def test_a_released_context_is_unknown(rpc: ModuleType, autograd: ModuleType) -> None:
    with autograd.context() as context:
        root = torch.ones(1, requires_grad=True) * 2
    with pytest.raises(RuntimeError, match=f"Could not find autograd context with id: {context}"):
        autograd.backward(context, [root])


def test_outside_of_a_session(hvd: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="RPC has not been initialized"):
        hvlike_autograd.backward(0, [torch.ones(1, requires_grad=True) * 2])


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
def test_a_call_that_returns_no_tensor(rpc: ModuleType, autograd: ModuleType, peer: int, mode: str) -> None:
    leaf = torch.ones(2, requires_grad=True)
    with autograd.context() as context:
        # Nothing but the argument tells the callee of this context.
        rpc.rpc_sync(peer, nothing, (leaf,))
        autograd.backward(context, [(leaf * 4).sum()], mode=mode)
        assert autograd.get_gradients(context)[leaf].tolist() == [4, 4]


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
