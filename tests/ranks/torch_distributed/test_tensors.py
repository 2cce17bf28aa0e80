"""Tensors that are special: leaves that require grad, parts of others, empty, 0-dim, large; others are in the model."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from support.torch_distributed.backend import BACKEND, World
from support.torch_distributed.values import mine, of_all


def test_leaves_that_require_grad_need_no_mode(world: World) -> None:
    """torch's backends write into tensors unseen by autograd."""
    first, total = mine(0), sum(of_all(world.size))
    for call, expected in (
        (dist.all_reduce, total),
        (lambda leaf: dist.broadcast(leaf, 0), first),
        (lambda leaf: dist.reduce(leaf, 0), total),
    ):
        leaf = mine(world.rank).requires_grad_()
        call(leaf)
        assert leaf.is_leaf
        assert leaf.grad_fn is None
        assert torch.equal(leaf, expected) or (expected is total and world.rank > 0)


def test_gathered_into_parts_of_one_tensor(world: World) -> None:
    """FSDP's way: each rank's input is the part of the output that is its own."""
    output = torch.zeros(world.size, 5)
    part = output[world.rank]
    part.copy_(mine(world.rank, 5))
    dist.all_gather_into_tensor(output.view(-1), part)
    assert torch.equal(output, torch.stack([mine(rank, 5) for rank in range(world.size)]))

    rows = torch.cat([mine(world.rank, 5)] * world.size)
    mine_of_it = rows.view(world.size, 5)[world.rank]
    dist.reduce_scatter_tensor(mine_of_it, rows)
    assert torch.equal(mine_of_it, sum(mine(rank, 5) for rank in range(world.size)))


@pytest.mark.parametrize("call", [dist.all_reduce, lambda tensor: dist.broadcast(tensor, 0)], ids=["sum", "root"])
def test_inference_tensors_outside_of_the_mode(world: World, call: Callable[[torch.Tensor], None]) -> None:
    with torch.inference_mode():
        tensor = torch.ones(2, 3)
    call(tensor)
    assert (tensor == (world.size if call is dist.all_reduce else 1)).all()


def test_exchanges_in_inference_mode(world: World) -> None:
    with torch.inference_mode():
        outputs, rows = torch.zeros(world.size, 3), [torch.full((3,), float(place)) for place in range(world.size)]
        dist.all_to_all(list(outputs), rows)
        assert (outputs == world.rank).all()
        dist.all_to_all_single(outputs.zero_(), torch.stack(rows))
        assert (outputs == world.rank).all()
        dist.scatter(outputs[0], rows if world.rank == 0 else None)
        assert (outputs[0] == world.rank).all()


def test_empty_and_0_dim_tensors_of_single_forms(world: World) -> None:
    output = torch.zeros(world.size)
    dist.all_gather_into_tensor(output, torch.tensor([float(world.rank)]))
    assert output.tolist() == list(map(float, range(world.size)))
    if BACKEND != "gloo":
        dist.all_gather_into_tensor(output.zero_(), torch.tensor(float(world.rank)))
        assert output.tolist() == list(map(float, range(world.size)))
        dist.all_gather_into_tensor(torch.zeros(0, 3), torch.zeros(0, 3))
        dist.reduce_scatter_tensor(torch.zeros(0), torch.zeros(0))
        scalar = torch.zeros(())
        dist.reduce_scatter_tensor(scalar, torch.arange(float(world.size)))
        assert scalar == world.rank * world.size
    dist.all_to_all_single(torch.zeros(0, 2), torch.zeros(0, 2), [0] * world.size, [0] * world.size)


def test_thirty_mebibytes(world: World) -> None:
    count = 30 * 2**18 // world.size + 3
    output = torch.zeros(world.size, count)
    rows, ranks = list(output), range(world.size)
    dist.all_gather_into_tensor(output.view(-1), torch.full((count,), float(world.rank)))
    assert all((row == rank).all() for rank, row in enumerate(rows))
    part = torch.zeros(count)
    dist.reduce_scatter_tensor(part, output.view(-1))
    assert (part == world.rank * world.size).all()
    exchanged = torch.zeros_like(output)
    dist.all_to_all_single(exchanged, output)
    assert (exchanged == world.rank).all()
    dist.all_to_all(list(exchanged), rows)
    assert (exchanged == world.rank).all()
    dist.reduce_scatter(part, rows)
    assert (part == world.rank * world.size).all()
    dist.scatter(part, rows if world.rank == 0 else None)
    assert (part == world.rank).all()
    dist.gather(part, list(exchanged) if world.rank == 0 else None)
    assert world.rank > 0 or torch.equal(exchanged, output)
    dist.all_gather(list(exchanged), part)
    assert torch.equal(exchanged, output)
    dist.all_reduce(output)
    assert all((row == rank * world.size).all() for rank, row in enumerate(rows))
    dist.reduce(output, 0)
    assert world.rank > 0 or all((row == rank * world.size**2).all() for rank, row in enumerate(rows))
    dist.broadcast(exchanged.fill_(world.rank), world.size - 1)
    assert (exchanged == ranks[-1]).all()


def test_results_are_written_where_the_caller_wants_them(world: World) -> None:
    tensor, outputs = mine(world.rank, 5), [torch.zeros(5) for _ in range(world.size)]
    places = [each.data_ptr() for each in (tensor, *outputs)]
    dist.all_reduce(tensor)
    dist.all_gather(outputs, tensor)
    assert [each.data_ptr() for each in (tensor, *outputs)] == places
