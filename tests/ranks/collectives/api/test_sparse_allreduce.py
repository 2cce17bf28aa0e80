"""sparse_allreduce_async: the sum of sparse tensors, whatever entries the ranks hold."""

from types import ModuleType

import pytest
import torch
from support.collectives.inputs import same
from torch import Tensor

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")


def dense_of(rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rank 0 holds nothing; the others some entries, of which some are shared."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randint(-3, 4, (6, 3), generator=generator)
    chosen = torch.rand(6, 3, generator=generator) < 0.4
    return (values * chosen * (rank > 0)).to(dtype)


@pytest.mark.parametrize("name", [None, "embedding"])
@pytest.mark.parametrize("sparse_dims", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.complex64], ids=str)
def test_the_sum_of_all_ranks(hvd: ModuleType, dtype: torch.dtype, sparse_dims: int, name: str | None) -> None:
    mine = dense_of(hvd.rank(), dtype).to_sparse(sparse_dims)
    wait = hvd.sparse_allreduce_async(mine, name, hvd.Sum)
    total = wait()
    right = torch.stack([dense_of(rank, dtype) for rank in range(hvd.size())]).sum(0).to(dtype)
    assert total.is_sparse
    assert total.dtype is dtype
    same(total.to_dense(), right)
    same(wait().to_dense(), right)
    same(mine.to_dense(), dense_of(hvd.rank(), dtype))


def test_the_average_is_the_default(hvd: ModuleType) -> None:
    wait = hvd.sparse_allreduce_async(dense_of(hvd.rank()).to_sparse(), name="grad")
    same(wait().to_dense(), torch.stack([dense_of(rank) for rank in range(hvd.size())]).mean(0))


def test_the_entries_of_all_ranks_lie_side_by_side(hvd: ModuleType) -> None:
    mine = torch.sparse_coo_tensor(torch.tensor([[2, 2]]), torch.tensor([1.0, 2.0]), (4,))
    total = hvd.sparse_allreduce_async(mine, op=hvd.Sum)()
    assert not total.is_coalesced()
    assert total._nnz() == 2 * hvd.size()
    assert total.coalesce().values().tolist() == [3.0 * hvd.size()]


def test_nobody_has_an_entry(hvd: ModuleType) -> None:
    total = hvd.sparse_allreduce_async(torch.zeros(5, 2).to_sparse(1), op=hvd.Sum)()
    assert total.shape == (5, 2)
    assert total._nnz() == 0


def test_several_in_flight(hvd: ModuleType) -> None:
    numbers = range(5) if hvd.rank() % 2 else range(4, -1, -1)
    waits = {
        number: hvd.sparse_allreduce_async((number * torch.eye(3)).to_sparse(), f"grad.{number}", hvd.Sum)
        for number in numbers
    }
    for number, wait in waits.items():
        same(wait().to_dense(), number * hvd.size() * torch.eye(3))
