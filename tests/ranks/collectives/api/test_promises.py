"""What collectives promise beside the values of the model: rounding, range, equal bits, sparse sums, inference mode."""

import time
from types import ModuleType

import pytest
import torch
from support.collectives.inputs import contribution, reduced, same
from torch import Tensor

from hvlike.collectives.controller.operations import even_rows


@pytest.mark.parametrize(("dtype", "largest"), [(torch.uint8, 255), (torch.int8, 127), (torch.int16, 32767)], ids=str)
def test_an_average_of_narrow_integers_does_not_overflow(hvd: ModuleType, dtype: torch.dtype, largest: int) -> None:
    mine = torch.full((9,), largest, dtype=dtype)
    assert hvd.allreduce(mine).tolist() == [largest] * 9
    assert hvd.allreduce_(mine).tolist() == [largest] * 9


def test_sums_of_16_bit_floats_are_rounded_once(hvd: ModuleType) -> None:
    if hvd.cross_size() > 1 or not hvd.is_homogeneous():
        pytest.skip("several nodes: rounded once on each node and once across")
    # One after the other in bfloat16, 256 + 1 + 1 + 1 would stay 256.
    mine = torch.tensor([256.0 if hvd.rank() == 0 else 1.0], dtype=torch.bfloat16)
    expected = torch.tensor([256.0 + hvd.size() - 1], dtype=torch.bfloat16)
    assert torch.equal(hvd.allreduce(mine, op=hvd.Sum), expected)


def test_the_deprecated_average_argument_still_works(hvd: ModuleType) -> None:
    mine = torch.ones(3)
    for average, expected in ((True, 1.0), (False, float(hvd.size()))):
        with pytest.warns(DeprecationWarning, match="has been replaced with `op`") as seen:
            result = hvd.allreduce(mine, average=average)
        assert result.tolist() == [expected] * 3
        assert seen[0].filename == __file__


def test_all_ranks_hold_the_same_bits(hvd: ModuleType) -> None:
    # Sums of such numbers depend on the order of the summands in their last bits.
    values = torch.randn(40_000, generator=torch.Generator().manual_seed(hvd.rank())) / 3
    total = hvd.allreduce(values)
    assert torch.equal(total, hvd.broadcast(total, root_rank=0))


def test_expanded_tensors_are_reduced_out_of_place(hvd: ModuleType) -> None:
    row = contribution(hvd.rank(), (1, 6), torch.float32)
    result = hvd.allreduce(row.expand(4, 6), op=hvd.Sum)
    rows = [contribution(rank, (1, 6), torch.float32) for rank in range(hvd.size())]
    same(result, sum(rows).expand(4, 6))
    result[0, 0] = 99  # the elements of the result are its own
    assert result[1, 0] != 99


def test_the_bits_of_nan_arrive_unchanged(hvd: ModuleType) -> None:
    payload = torch.tensor([0x7FC01234 + hvd.rank(), -1], dtype=torch.int32)
    arrived = hvd.broadcast(payload.view(torch.float32), root_rank=0).view(torch.int32)
    assert arrived.tolist() == [0x7FC01234, -1]


@pytest.mark.parametrize(
    ("total", "size", "rows"),
    [(5, 2, (3, 2)), (5, 3, (2, 2, 1)), (2, 4, (1, 1, 0, 0)), (0, 3, (0, 0, 0)), (8, 4, (2, 2, 2, 2)), (7, 1, (7,))],
)
def test_the_first_ranks_have_one_row_more(total: int, size: int, rows: tuple[int, ...]) -> None:
    assert even_rows(total, size) == rows


def test_the_order_of_the_arguments_is_horovods(hvd: ModuleType) -> None:
    ones = torch.ones(hvd.size())
    scaled = hvd.reducescatter(ones, "rows", hvd.Compression.fp16, hvd.Sum, hvd.global_process_set, 2.0, 3.0)
    assert scaled.tolist() == [6.0 * hvd.size()]
    handle = hvd.reducescatter_async(ones, "rows", hvd.Sum, hvd.global_process_set, 2.0, 3.0)
    assert hvd.synchronize(handle).tolist() == [6.0 * hvd.size()]
    group = hvd.grouped_reducescatter([ones], "rows", hvd.Compression.fp16, hvd.Sum, hvd.global_process_set, 2.0, 3.0)
    assert group[0].tolist() == [6.0 * hvd.size()]
    handle = hvd.grouped_reducescatter_async([ones], "rows", hvd.Sum, hvd.global_process_set, 2.0, 3.0)
    assert hvd.synchronize(handle)[0].tolist() == [6.0 * hvd.size()]


def test_sixteen_bit_averages_do_not_overflow(hvd: ModuleType) -> None:
    mine = torch.full((4,), 40000.0, dtype=torch.float16)
    assert torch.equal(hvd.allreduce(mine), mine)
    result = hvd.reducescatter(torch.full((hvd.size(), 10), 60000.0, dtype=torch.float16))
    assert bool((result == 60000.0).all())


def dense_of(rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rank 0 holds nothing; the others some entries, of which some are shared."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randint(-3, 4, (6, 3), generator=generator)
    chosen = torch.rand(6, 3, generator=generator) < 0.4
    return (values * chosen * (rank > 0)).to(dtype)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("name", [None, "embedding"])
@pytest.mark.parametrize("sparse_dims", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.complex64], ids=str)
def test_sparse_sums_of_all_ranks(hvd: ModuleType, dtype: torch.dtype, sparse_dims: int, name: str | None) -> None:
    mine = dense_of(hvd.rank(), dtype).to_sparse(sparse_dims)
    wait = hvd.sparse_allreduce_async(mine, name, hvd.Sum)
    total = wait()
    right = torch.stack([dense_of(rank, dtype) for rank in range(hvd.size())]).sum(0).to(dtype)
    assert total.is_sparse
    assert total.dtype is dtype
    same(total.to_dense(), right)
    same(wait().to_dense(), right)
    same(mine.to_dense(), dense_of(hvd.rank(), dtype))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_the_entries_of_all_ranks_lie_side_by_side(hvd: ModuleType) -> None:
    mine = torch.sparse_coo_tensor(torch.tensor([[2, 2]]), torch.tensor([1.0, 2.0]), (4,))
    total = hvd.sparse_allreduce_async(mine, op=hvd.Sum)()
    assert not total.is_coalesced()
    assert total._nnz() == 2 * hvd.size()
    assert total.coalesce().values().tolist() == [3.0 * hvd.size()]


def test_nobody_has_an_entry_and_the_average_is_the_default(hvd: ModuleType) -> None:
    wait = hvd.sparse_allreduce_async(dense_of(hvd.rank()).to_sparse(), name="grad")
    same(wait().to_dense(), torch.stack([dense_of(rank) for rank in range(hvd.size())]).mean(0))
    total = hvd.sparse_allreduce_async(torch.zeros(5, 2).to_sparse(1), op=hvd.Sum)()
    assert total.shape == (5, 2)
    assert total._nnz() == 0


@pytest.mark.parametrize("pause", [0.0, 0.005], ids=["this thread", "the loop's thread"])
def test_groups_are_reduced_in_inference_mode_whichever_thread_goes_on(hvd: ModuleType, pause: float) -> None:
    for number in range(6):
        with torch.inference_mode(number % 3 < 2):
            contributions = [torch.full((3, 500 + number // 2), rank + 1.0) for rank in range(hvd.size())]
            given = [contributions[hvd.rank()].clone(), contributions[hvd.rank()].t().contiguous().t()]
            handles = [hvd.grouped_allreduce_async(given, op=hvd.Sum), hvd.broadcast_async(given[1], 0)]
            time.sleep(pause)
            for total in hvd.synchronize(handles[0]):
                same(total, reduced(hvd.Sum, contributions))
            same(hvd.synchronize(handles[1]), contributions[0])
            for each in given:
                hvd.allreduce_(each, op=hvd.Max)
                same(each, contributions[-1])
