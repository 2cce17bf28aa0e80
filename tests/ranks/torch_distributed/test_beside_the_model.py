"""Collectives beside the model: scaled and sparse sums, one rounding, shapes by pair of ranks, large tensors."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from support.torch_distributed.backend import BACKEND, World, beyond_gloo, mine, of_all, on_several_hosts


@beyond_gloo
@pytest.mark.skipif(not hasattr(dist.ReduceOp, "factor"), reason="this torch does not tell the factor")
def test_a_sum_of_scaled_tensors(world: World) -> None:
    """PREMUL_SUM multiplies what each rank brings by its factor."""
    expected = sum(tensor * 0.5 for tensor in of_all(world.size))
    for factor in (0.5, torch.tensor([0.5])):
        op = dist._make_nccl_premul_sum(factor)
        tensor = mine(world.rank)
        dist.all_reduce(tensor, op)
        assert torch.equal(tensor, expected)
        output = torch.empty(2, 3)
        dist.reduce_scatter_tensor(output, torch.cat([mine(world.rank)] * world.size), op)
        assert torch.equal(output, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@beyond_gloo
def test_sixteen_bit_floats_are_summed_in_32(world: World, dtype: torch.dtype) -> None:
    """1 + e + e ... loses every e in 16 bits."""
    if on_several_hosts(world):
        pytest.skip("partial sums travel in 16 bits")
    small = torch.finfo(dtype).eps / 2
    tensor = torch.full((40,), 1.0 if world.rank == 0 else small, dtype=dtype)
    dist.all_reduce(tensor)
    exact = 1.0 + small * (world.size - 1)
    assert torch.equal(tensor, torch.full((40,), exact, dtype=torch.float32).to(dtype))


def test_every_rank_has_the_same_bits(world: World) -> None:
    generator = torch.Generator().manual_seed(world.rank)
    for count in (1, 7, 1000, 100_001):
        tensor = torch.randn(count, generator=generator)
        dist.all_reduce(tensor)
        rows = [torch.empty_like(tensor) for _ in range(world.size)]
        dist.all_gather(rows, tensor)
        assert all(torch.equal(row, tensor) for row in rows)


def test_not_a_number_spreads(world: World) -> None:
    tensor = torch.tensor([float("nan") if world.rank == world.size - 1 else 1.0, float("inf"), 1.0])
    dist.all_reduce(tensor)
    assert tensor[0].isnan()
    assert tensor[1].isinf()
    assert tensor[2] == world.size


def sparse_of(kind: str, rank: int, size: int) -> torch.Tensor:
    """What a rank brings to a sum of sparse tensors."""
    if kind == "of two dimensions":
        return torch.sparse_coo_tensor([[0, 1], [rank, 0]], [1.0, 2.0], (2, size))
    if kind == "entries repeat":
        return torch.sparse_coo_tensor([[1, 1]], [1.0, 2.0], (3,))
    # The number of entries differs; in the last case it is 0 on all ranks.
    count = rank + 1 if kind == "uneven" else 0
    indices = torch.arange(count).unsqueeze(0)
    return torch.sparse_coo_tensor(indices, torch.ones(count, 3), (size + 1, 3))


@pytest.mark.parametrize("kind", ["uneven", "of two dimensions", "entries repeat", "empty"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_sparse_sum(world: World, kind: str, asynchronous: bool) -> None:
    tensor = sparse_of(kind, world.rank, world.size)
    work = dist.all_reduce(tensor, async_op=asynchronous)
    if work is not None:
        work.wait()
    assert tensor.is_sparse
    assert torch.equal(
        tensor.to_dense(), sum(sparse_of(kind, rank, world.size).to_dense() for rank in range(world.size))
    )


@beyond_gloo
def test_coalesced_all_reduces_of_complex_and_real_tensors(world: World) -> None:
    tensors = [mine(world.rank, 2), mine(world.rank, 3, dtype=torch.complex64)]
    dist.all_reduce_coalesced(tensors)
    for tensor in tensors:
        assert torch.equal(tensor, sum(of_all(world.size, *tensor.shape, dtype=tensor.dtype)))


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(
        a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(one, other, strict=True)
    )


def parcel(sender: int, receiver: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return mine(7 * sender + receiver, *shape, dtype=dtype)


@beyond_gloo
def test_all_to_all_of_different_shapes(world: World) -> None:
    """What rank i sends to rank j is of i + 1 rows and j columns."""
    outputs = [torch.zeros(place + 1, world.rank) for place in range(world.size)]
    dist.all_to_all(outputs, [parcel(world.rank, place, world.rank + 1, place) for place in range(world.size)])
    assert equal(outputs, [parcel(place, world.rank, place + 1, world.rank) for place in range(world.size)])


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
