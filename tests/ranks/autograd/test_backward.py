"""backward() over workers: what is in the context on which worker when it returns."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from support.autograd.backward_functions import call_on, gradient_of_weight, parts, square, times_weight, twice, weight
from support.autograd.sights import in_another_thread

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


@pytest.mark.parametrize("mode", MODES)
def test_several_roots_are_summed(rpc: ModuleType, autograd: ModuleType, peer: int, mode: str) -> None:
    leaf = torch.full((2,), 3.0, requires_grad=True)
    with autograd.context() as context:
        shared = rpc.rpc_sync(peer, square, (leaf,))
        roots = [shared.sum(), (2 * shared).sum(), (10 * leaf).sum(), rpc.rpc_sync(peer, twice, (leaf,)).sum()]
        autograd.backward(context, roots, mode=mode)
        assert autograd.get_gradients(context)[leaf].tolist() == [30, 30]


def test_roots_may_be_any_iterable_of_one_element_tensors(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    leaf = torch.ones(1, 1, requires_grad=True)
    with autograd.context() as context:
        autograd.backward(context, (rpc.rpc_sync(peer, twice, (leaf,)),))
        autograd.backward(context, (rpc.rpc_sync(peer, twice, (leaf,)) for _ in range(2)))
        assert autograd.get_gradients(context)[leaf].tolist() == [[6]]


def test_a_second_root_that_has_nothing_to_do_with_the_first(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    first, second = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    with autograd.context() as context:
        roots = [rpc.rpc_sync(peer, twice, (leaf,)).sum() for leaf in (first, second)]
        autograd.backward(context, roots[:1])
        assert list(autograd.get_gradients(context)) == [first]
        autograd.backward(context, roots[1:])
        assert autograd.get_gradients(context)[second].tolist() == [2, 2]


def test_a_thousand_backwards_add_up(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    leaf = torch.ones(3, requires_grad=True)
    with autograd.context() as context:
        loss = rpc.rpc_sync(peer, times_weight, ("summed up", leaf)).sum()
        autograd.backward(context, [loss], retain_graph=True)
        early = autograd.get_gradients(context)[leaf]
        for _ in range(999):
            autograd.backward(context, [loss], retain_graph=True)
        assert autograd.get_gradients(context)[leaf].tolist() == [1000, 2000, 3000]
        assert rpc.rpc_sync(peer, gradient_of_weight, (context, "summed up")).tolist() == [1000, 1000, 1000]
        # As in torch: what was fetched shows the sum.
        assert early.tolist() == [1000, 2000, 3000]


def test_hooks_of_leaves_change_what_is_kept(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    leaf = torch.ones(2, requires_grad=True)
    leaf.register_hook(lambda gradient: gradient * 10)
    with autograd.context() as context:
        value = rpc.rpc_sync(peer, twice, (leaf,)) + rpc.rpc_sync(peer, square, (leaf,))
        autograd.backward(context, [value.sum()])
        assert autograd.get_gradients(context)[leaf].tolist() == [40, 40]


def test_hooks_of_the_node_that_accumulates_run_once_each(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    total = 0

    def adds(number: int) -> object:
        def hook(inputs: object, outputs: object) -> None:
            nonlocal total
            total += number

        return hook

    left, right = (torch.rand(3, 3, requires_grad=True) for _ in range(2))
    with autograd.context() as context:
        # Both edges lead to one node.
        local = torch.add(left, left)
        node = local.grad_fn.next_functions[0][0]
        for number in (1, 2, 2):
            node.register_hook(adds(number))
        value = rpc.rpc_sync(peer, torch.matmul, (local, right))
        autograd.backward(context, [value.sum()])
        assert total == 5
        assert set(autograd.get_gradients(context)) == {left, right}


def test_sparse_gradients_stay_sparse(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    leaf = torch.sparse_coo_tensor([[0, 0, 2]], [1.0, 1, 1], (4,), requires_grad=True, check_invariants=True)
    dense = torch.ones(4, requires_grad=True)
    with autograd.context() as context:
        for _ in range(2):
            result = rpc.rpc_sync(peer, torch.add, (leaf, leaf))
            autograd.backward(context, [torch.sparse.sum(result)])
        gradient = autograd.get_gradients(context)[leaf]
        assert gradient.is_sparse
        assert gradient.coalesce().values().tolist() == [4, 4]
        autograd.backward(context, [torch.sparse.sum(rpc.rpc_sync(peer, torch.mul, (leaf, dense)))])
        assert dense in autograd.get_gradients(context)


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


def test_each_leaf_gets_its_own_dtype(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    leaves = [torch.ones(2, dtype=dtype, requires_grad=True) for dtype in (torch.float32, torch.float64, torch.half)]
    with autograd.context() as context:
        result = rpc.rpc_sync(peer, torch.add, (rpc.rpc_sync(peer, torch.mul, (leaves[0], leaves[1])), leaves[2]))
        assert result.dtype is torch.float64
        autograd.backward(context, [result.sum()])
        gradients = autograd.get_gradients(context)
        assert [gradients[leaf].dtype for leaf in leaves] == [leaf.dtype for leaf in leaves]


@pytest.mark.parametrize("mode", MODES)
def test_results_of_which_a_part_is_used(rpc: ModuleType, autograd: ModuleType, peer: int, mode: str) -> None:
    leaf = torch.ones(2, requires_grad=True)
    with autograd.context() as context:
        first, _, third = rpc.rpc_sync(peer, parts, (leaf,))
        autograd.backward(context, [first.sum()], retain_graph=True, mode=mode)
        assert autograd.get_gradients(context)[leaf].tolist() == [3, 0]
        autograd.backward(context, [third.narrow(0, 1, 1).sum()], mode=mode)
        assert autograd.get_gradients(context)[leaf].tolist() == [3, 5]


def test_a_tensor_that_travels_twice_and_its_views(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    leaf = torch.ones(4, requires_grad=True)
    with autograd.context() as context:
        result = rpc.rpc_sync(peer, torch.stack, ([leaf, leaf, leaf[::2].repeat(2)],))
        autograd.backward(context, [result.sum()])
        assert autograd.get_gradients(context)[leaf].tolist() == [4, 2, 4, 2]


def test_the_gradient_of_a_module_that_came_as_an_argument(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    layer = torch.nn.Linear(2, 1)
    with autograd.context() as context:
        result = rpc.rpc_sync(peer, torch.nn.functional.linear, (torch.ones(3, 2), layer.weight, layer.bias))
        autograd.backward(context, [result.sum()])
        gradients = autograd.get_gradients(context)
        assert gradients[layer.weight].tolist() == [[3, 3]]
        assert gradients[layer.bias].tolist() == [3]


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
