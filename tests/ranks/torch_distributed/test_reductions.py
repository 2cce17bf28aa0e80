"""Reductions beside the model: scaled and sparse sums, one rounding, equal bits, not-a-numbers."""

import pytest
import torch
import torch.distributed as dist
from support.torch_distributed.backend import BACKEND, World, beyond_gloo, on_several_hosts
from support.torch_distributed.values import ReduceOp, mine, of_all


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


def test_an_average_is_the_sum_divided_once(world: World) -> None:
    tensor = torch.full((3,), 0.1 + world.rank)
    op = ReduceOp.AVG if BACKEND != "gloo" else ReduceOp.SUM
    dist.all_reduce(tensor, op)
    total = sum(torch.full((3,), 0.1 + rank) for rank in range(world.size))
    torch.testing.assert_close(tensor, total / world.size if op == ReduceOp.AVG else total)


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


def test_a_sparse_sum(world: World) -> None:
    """Each rank brings its own number of entries; the result is the same everywhere."""
    indices = torch.arange(world.rank + 1).unsqueeze(0)
    tensor = torch.sparse_coo_tensor(indices, torch.ones(world.rank + 1, 3), (world.size + 1, 3))
    dist.all_reduce(tensor)
    assert tensor.is_sparse
    expected = torch.zeros(world.size + 1, 3)
    for rank in range(world.size):
        expected[: rank + 1] += 1
    assert torch.equal(tensor.to_dense(), expected)


def test_a_sparse_sum_of_two_sparse_dimensions_and_of_nothing(world: World) -> None:
    places = torch.tensor([[0, 1], [world.rank, 0]])
    tensor = torch.sparse_coo_tensor(places, torch.tensor([1.0, 2.0]), (2, world.size))
    dist.all_reduce(tensor)
    expected = torch.zeros(2, world.size)
    expected[0] += 1
    expected[1, 0] += 2 * world.size
    assert torch.equal(tensor.to_dense(), expected)

    empty = torch.sparse_coo_tensor(torch.zeros(1, 0, dtype=torch.long), torch.zeros(0, 2), (4, 2))
    dist.all_reduce(empty)
    assert torch.equal(empty.to_dense(), torch.zeros(4, 2))


def test_a_sparse_sum_whose_entries_repeat(world: World) -> None:
    """Uncoalesced entries of one place are summed, too."""
    tensor = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([1.0, 2.0]), (3,))
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    assert torch.equal(tensor.to_dense(), torch.tensor([0.0, 3.0 * world.size, 0.0]))


@beyond_gloo
def test_coalesced_all_reduces_of_complex_and_real_tensors(world: World) -> None:
    tensors = [mine(world.rank, 2), mine(world.rank, 3, dtype=torch.complex64)]
    dist.all_reduce_coalesced(tensors)
    for tensor in tensors:
        assert torch.equal(tensor, sum(of_all(world.size, *tensor.shape, dtype=tensor.dtype)))
