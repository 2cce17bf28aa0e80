"""Many backwards at a time: in contexts of their own on a bounded pool of threads, and in one context."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from support.autograd.backward_functions import square, times_weight, twice, weight

THREADS = 20


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run work(0), work(1) and so on at a time; raise what one of them has raised."""
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("mode", ["fast", "safe", "smart"])
def test_twenty_threads_of_every_worker_with_four_chained_calls(
    rpc: ModuleType, autograd: ModuleType, mode: str
) -> None:
    def train(number: int) -> None:
        first, second = (torch.rand(3, 3, requires_grad=True) for _ in range(2))
        with autograd.context() as context:
            value = rpc.rpc_sync(0, torch.add, (first, second))
            value = rpc.rpc_sync(0, torch.mul, (first, value))
            value = rpc.rpc_sync(0, torch.matmul, (value, second))
            value = rpc.rpc_sync(0, torch.add, (value, second))
            autograd.backward(context, [value.sum()], mode=mode)
            gradients = autograd.get_gradients(context)
            expected = torch.autograd.grad((first * (first + second) @ second + second).sum(), [first, second])
            torch.testing.assert_close([gradients[first], gradients[second]], list(expected))

    in_threads(THREADS, train)


def test_trainers_of_one_parameter_server_do_not_meet(hvd: ModuleType, rpc: ModuleType, autograd: ModuleType) -> None:
    def train(number: int) -> None:
        scale = 1.0 + hvd.rank() * 10 + number
        with autograd.context() as context:
            result = rpc.rpc_sync(0, times_weight, ("of the server", torch.full((3,), scale)))
            for _ in range(3):
                autograd.backward(context, [result.sum()], retain_graph=True)
            assert rpc.rpc_sync(0, server_gradient, (context,)) == [3 * scale] * 3

    in_threads(4, train)


def server_gradient(context: int) -> list[float]:
    from hvlike import autograd

    gradients = autograd.get_gradients(context)
    found: list[float] = gradients[weight("of the server", 3)].tolist()
    return found


def test_backwards_at_a_time_in_one_context(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    leaf = torch.full((2,), 3.0, requires_grad=True)
    with autograd.context() as context:
        roots = [rpc.rpc_sync(peer, function, (leaf,)).sum() for function in (twice, square, twice)]

        def run(number: int) -> None:
            for _ in range(5):
                autograd.backward(context, [roots[number]], retain_graph=True)

        in_threads(3, run)
        assert autograd.get_gradients(context)[leaf].tolist() == [50, 50]


def backward_of(context: int, value: torch.Tensor) -> None:
    from hvlike import autograd

    autograd.backward(context, [value.sum()], retain_graph=True)


def test_backwards_at_a_time_from_several_workers(hvd: ModuleType, rpc: ModuleType, autograd: ModuleType) -> None:
    leaf = torch.ones(2, requires_grad=True)
    with autograd.context() as context:
        futures = [
            rpc.rpc_async(rank, backward_of, (context, leaf * 3)) for rank in range(hvd.size()) for _ in range(3)
        ]
        torch.futures.wait_all(futures)
        assert autograd.get_gradients(context)[leaf].tolist() == [9 * hvd.size()] * 2
