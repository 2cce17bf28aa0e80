"""backward() over workers: what is in the context on which worker when it returns, also of many at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from support.autograd.sights import (
    call_on,
    gradient_of_weight,
    in_another_thread,
    parts,
    square,
    times_weight,
    twice,
    weight,
)

import hvlike.autograd

MODES = ["fast", "safe", "smart"]


@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_a_call_are_those_of_one_process(
    rpc: ModuleType, autograd: ModuleType, peer: int, mode: str
) -> None:
    left = torch.rand(3, 3, requires_grad=True)
    right = torch.rand(3, 3, requires_grad=True)
    with autograd.context() as context:
        result = rpc.rpc_sync(peer, torch.mul, (rpc.rpc_sync(peer, torch.add, (left, right)), left))
        autograd.backward(context, [result.sum()], mode=mode)
        gradients = autograd.get_gradients(context)
        expected = torch.autograd.grad(((left + right) * left).sum(), [left, right])
        assert len(gradients) == 2
        torch.testing.assert_close(gradients[left], expected[0])
        torch.testing.assert_close(gradients[right], expected[1])
        assert not any(gradient.requires_grad for gradient in gradients.values())
    assert left.grad is None
    assert right.grad is None


def test_grad_is_neither_read_nor_written(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    leaf = torch.ones(2, requires_grad=True)
    leaf.grad = torch.full((2,), 7.0)
    with autograd.context() as context:
        assert autograd.get_gradients(context) == {}
        autograd.backward(context, [rpc.rpc_sync(peer, twice, (leaf,)).sum()])
        assert autograd.get_gradients(context)[leaf].tolist() == [2, 2]
    assert leaf.grad.tolist() == [7, 7]


@pytest.mark.parametrize("mode", MODES)
def test_leaves_of_all_workers_on_the_way_have_theirs_when_it_returns(
    hvd: ModuleType, rpc: ModuleType, autograd: ModuleType, mode: str
) -> None:
    way = [(hvd.rank() + step) % hvd.size() for step in range(1, 2 * hvd.size())]
    name = f"of rank {hvd.rank()}, {mode}"
    leaf = torch.ones(4, requires_grad=True)
    with autograd.context() as context:
        value = leaf
        for rank in way:
            value = rpc.rpc_sync(rank, times_weight, (name, value))
        autograd.backward(context, [value.sum()], mode=mode)
        product = torch.arange(1.0, 5.0) ** len(way)
        torch.testing.assert_close(autograd.get_gradients(context)[leaf], product)
        for rank in range(hvd.size()):
            got = rpc.rpc_sync(rank, gradient_of_weight, (context, name)) if rank in way else None
            if got is not None:
                torch.testing.assert_close(got, way.count(rank) * product / torch.arange(1.0, 5.0))


@pytest.mark.parametrize("mode", MODES)
def test_calls_within_calls(hvd: ModuleType, rpc: ModuleType, autograd: ModuleType, mode: str) -> None:
    way = [(hvd.rank() + step) % hvd.size() for step in range(1, hvd.size() + 2)]
    leaf = torch.full((3,), 3.0, requires_grad=True)
    with autograd.context() as context:
        result = rpc.rpc_sync(way[0], call_on, (way[1:], square, leaf))
        autograd.backward(context, [result.sum()], mode=mode)
        assert autograd.get_gradients(context)[leaf].tolist() == [6, 6, 6]


def test_several_roots_in_any_iterable_are_summed(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    leaf = torch.full((1, 1), 3.0, requires_grad=True)
    with autograd.context() as context:
        shared = rpc.rpc_sync(peer, square, (leaf,))
        autograd.backward(context, (shared, 2 * shared, 10 * leaf))
        autograd.backward(context, (rpc.rpc_sync(peer, twice, (leaf,)) for _ in range(2)))
        assert autograd.get_gradients(context)[leaf].tolist() == [[32]]


def test_two_hundred_backwards_add_up(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    leaf = torch.ones(3, requires_grad=True)
    with autograd.context() as context:
        loss = rpc.rpc_sync(peer, times_weight, ("summed up", leaf)).sum()
        autograd.backward(context, [loss], retain_graph=True)
        early = autograd.get_gradients(context)[leaf]
        for _ in range(199):
            autograd.backward(context, [loss], retain_graph=True)
        assert autograd.get_gradients(context)[leaf].tolist() == [200, 400, 600]
        assert rpc.rpc_sync(peer, gradient_of_weight, (context, "summed up")).tolist() == [200, 200, 200]
        # As in torch: what was fetched shows the sum.
        assert early.tolist() == [200, 400, 600]


def looked_up(name: str, rows: torch.Tensor) -> torch.Tensor:
    """An embedding of this worker, with sparse gradients."""
    return torch.nn.functional.embedding(rows, weight(name, 4, 2), sparse=True)


def summed_up(name: str, rows: torch.Tensor) -> torch.Tensor:
    """The same rows in a bag."""
    return torch.nn.functional.embedding_bag(rows[None], weight(name, 4, 2), sparse=True, mode="sum")


def test_sparse_gradients_of_embeddings_elsewhere(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    with autograd.context() as context:
        for function in (looked_up, summed_up):
            for _ in range(2):
                rows = rpc.rpc_sync(peer, function, (function.__name__, torch.tensor([1, 3, 1])))
                autograd.backward(context, [rows.sum()])
            gradient = rpc.rpc_sync(peer, gradient_of_weight, (context, function.__name__))
            assert gradient.is_sparse
            assert gradient.to_dense().tolist() == [[0, 0], [4, 4], [0, 0], [2, 2]]


@pytest.mark.parametrize("mode", MODES)
def test_results_of_which_a_part_is_used(rpc: ModuleType, autograd: ModuleType, peer: int, mode: str) -> None:
    leaf = torch.ones(2, requires_grad=True)
    with autograd.context() as context:
        first, _, third = rpc.rpc_sync(peer, parts, (leaf,))
        autograd.backward(context, [first.sum()], retain_graph=True, mode=mode)
        assert autograd.get_gradients(context)[leaf].tolist() == [3, 0]
        autograd.backward(context, [third.narrow(0, 1, 1).sum()], mode=mode)
        assert autograd.get_gradients(context)[leaf].tolist() == [3, 5]


def test_the_owner_of_an_rref_begins(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    leaf = torch.ones(2, requires_grad=True)
    with autograd.context() as context:
        reference = rpc.RRef(rpc.rpc_sync(peer, square, (leaf,)).sum())
        reference.backward(context)
        assert autograd.get_gradients(context)[leaf].tolist() == [2, 2]


def test_the_user_of_an_rref_has_its_owner_begin(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    leaf = torch.full((2,), 3.0, requires_grad=True)
    with autograd.context() as context:
        reference = rpc.remote(peer, sum_with_weight, (f"for {rpc.get_worker_info().id}", leaf))
        reference.backward(context, retain_graph=True)
        reference.backward(context)
        assert autograd.get_gradients(context)[leaf].tolist() == [2, 4]
        gradient = rpc.rpc_sync(peer, gradient_of_weight, (context, f"for {rpc.get_worker_info().id}"))
        assert gradient.tolist() == [6, 6]
        with pytest.raises(RuntimeError, match="Could not find autograd context with id: 77"):
            reference.backward(77)


def gradient_of_value(context: int, reference: Any) -> Any:
    """What backward has left for the value of an RRef of this worker, asked for in another thread."""
    return in_another_thread(lambda: hvlike.autograd.get_gradients(context)[reference.local_value()])


def test_the_owner_finds_a_gradient_by_the_value_of_an_rref(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    reference = rpc.remote(peer, leaf_of_ones)
    with autograd.context() as context:
        value = reference.to_here()
        autograd.backward(context, [(value * 3).sum()])
        assert rpc.rpc_sync(peer, gradient_of_value, (context, reference)).tolist() == [3, 3]
        # What has come here is no leaf, and its gradient has gone on.
        assert (value in autograd.get_gradients(context)) == reference.is_owner()


def leaf_of_ones() -> torch.Tensor:
    return torch.ones(2, requires_grad=True)


def sum_with_weight(name: str, value: torch.Tensor) -> torch.Tensor:
    return times_weight(name, value).sum()


def backward_here(context: int, value: torch.Tensor) -> None:
    """Begin a backward on a worker that did not create the context."""
    from hvlike import autograd

    autograd.backward(context, [value.sum()])


def test_any_worker_of_the_context_may_begin(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    leaf = torch.ones(2, requires_grad=True)
    with autograd.context() as context:
        rpc.rpc_sync(peer, backward_here, (context, leaf * 3))
        assert autograd.get_gradients(context)[leaf].tolist() == [3, 3]


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
