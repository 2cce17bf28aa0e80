"""all_reduce, reduce and reduce_scatter: every operation and dtype that torch.distributed.ReduceOp defines."""

import itertools

import pytest
import torch
import torch.distributed as dist
from support.torch_distributed.backend import BACKEND, World, beyond_gloo, on_several_hosts
from support.torch_distributed.values import (
    COMPLEX,
    FLOATS,
    INTEGERS,
    UNKNOWN_TO_GLOO,
    ReduceOp,
    mine,
    of_all,
    reduced,
)
from torch import Tensor

BITWISE = ("BAND", "BOR", "BXOR")
CASES = [
    *itertools.product(("SUM", "PRODUCT", "MIN", "MAX"), (*FLOATS, *INTEGERS, torch.bool)),
    *itertools.product(("AVG",), (*FLOATS, *COMPLEX)),
    *itertools.product(("SUM",), COMPLEX),
    *itertools.product(BITWISE, (*INTEGERS, torch.bool)),
]


def refused_by_gloo(op: str, dtype: torch.dtype) -> bool:
    return dtype in UNKNOWN_TO_GLOO or op in (*BITWISE, "AVG")


each_case = pytest.mark.parametrize(
    ("op", "dtype"),
    [
        pytest.param(op, dtype, marks=beyond_gloo if refused_by_gloo(op, dtype) else (), id=f"{op}-{str(dtype)[6:]}")
        for op, dtype in CASES
    ],
)


@each_case
def test_all_reduce_leaves_the_same_on_every_rank(world: World, op: str, dtype: torch.dtype) -> None:
    tensor = mine(world.rank, dtype=dtype)
    assert dist.all_reduce(tensor, getattr(ReduceOp, op)) is None
    torch.testing.assert_close(tensor, reduced(op, of_all(world.size, dtype=dtype)))


@each_case
def test_reduce_writes_on_the_root_alone(world: World, op: str, dtype: torch.dtype) -> None:
    expected = reduced(op, of_all(world.size, dtype=dtype))
    for root in range(world.size):
        tensor = mine(world.rank, dtype=dtype)
        dist.reduce(tensor, root, getattr(ReduceOp, op))
        if world.rank == root:
            torch.testing.assert_close(tensor, expected)
        elif BACKEND != "gloo":
            # gloo leaves what it had on the way.
            assert torch.equal(tensor, mine(world.rank, dtype=dtype))


@each_case
def test_reduce_scatter_leaves_each_rank_its_part(world: World, op: str, dtype: torch.dtype) -> None:
    """Rank i gets the reduction of tensor number i of every rank."""
    parts = [mine(world.rank + place, dtype=dtype) for place in range(world.size)]
    expected = reduced(op, [mine(rank + world.rank, dtype=dtype) for rank in range(world.size)])
    output = torch.zeros(2, 3, dtype=dtype)
    dist.reduce_scatter(output, parts, getattr(ReduceOp, op))
    torch.testing.assert_close(output, expected)

    output = torch.zeros(2, 3, dtype=dtype)
    dist.reduce_scatter_tensor(output, torch.cat(parts), getattr(ReduceOp, op))
    torch.testing.assert_close(output, expected)

    if BACKEND != "gloo":
        dist.reduce_scatter_tensor(output.zero_(), torch.stack(parts), getattr(ReduceOp, op))
        torch.testing.assert_close(output, expected)
    assert all(torch.equal(part, mine(world.rank + place, dtype=dtype)) for place, part in enumerate(parts))


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


def sums(world: World, *tensors: Tensor) -> bool:
    return all(torch.equal(tensor, reduced("SUM", of_all(world.size, *tensor.shape))) for tensor in tensors)


def test_coalesced_all_reduces(world: World) -> None:
    shapes = ((3,), (2, 2), (5, 1, 2))
    tensors = [mine(world.rank, *shape) for shape in shapes]
    dist.all_reduce_coalesced(tensors)
    assert sums(world, *tensors)

    tensors = [mine(world.rank, *shape) for shape in shapes]
    dist.all_reduce_coalesced(tensors, async_op=True).wait()
    assert sums(world, *tensors)

    tensors = [mine(world.rank, *shape) for shape in shapes]
    with dist.distributed_c10d._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    assert sums(world, *tensors)

    tensors = [mine(world.rank, *shape) for shape in shapes]
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    assert sums(world, *tensors)


@pytest.mark.parametrize("op", ["PRODUCT", "MIN", "MAX"])
def test_coalesced_all_reduces_by_other_operations(world: World, op: str) -> None:
    tensors = [mine(world.rank, 2), mine(world.rank, 3)]
    dist.all_reduce_coalesced(tensors, getattr(ReduceOp, op))
    for tensor in tensors:
        assert torch.equal(tensor, reduced(op, of_all(world.size, *tensor.shape)))


@beyond_gloo
def test_coalesced_all_reduces_of_complex_and_real_tensors(world: World) -> None:
    tensors = [mine(world.rank, 2), mine(world.rank, 3, dtype=torch.complex64)]
    dist.all_reduce_coalesced(tensors)
    for tensor in tensors:
        assert torch.equal(tensor, reduced("SUM", of_all(world.size, *tensor.shape, dtype=tensor.dtype)))


@beyond_gloo
def test_coalesced_reduce_scatters(world: World) -> None:
    for asynchronous in (False, True):
        outputs = [torch.empty(2), torch.empty(3)]
        with dist.distributed_c10d._coalescing_manager(async_ops=asynchronous) as manager:
            for output in outputs:
                dist.reduce_scatter_tensor(output, torch.cat([mine(world.rank, *output.shape)] * world.size))
        if asynchronous:
            manager.wait()
        assert sums(world, *outputs)
