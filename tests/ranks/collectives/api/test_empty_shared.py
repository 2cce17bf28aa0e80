"""Tensors of empty_shared: reduced where they are when every rank passes the same place, and right in any case."""

import gc
import os
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from support.collectives.inputs import OPS, contribution, reduced, same
from torch import Tensor

from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.backends.shared_memory.in_place_shm import InPlaceReduction
from hvlike.backends.shared_memory.work_sync import LEAST_SHARED
from hvlike.errors import HorovodInternalError, MismatchError, ShapeMismatchError, UsageError

LONG = 3 * 65536 + 17


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors each reduction without staging has had, one entry for each."""
    counts: list[int] = []
    begin = InPlaceReduction.begin

    def counted(reduction: InPlaceReduction, number: int) -> None:
        counts.append(reduction.tensors)
        begin(reduction, number)

    monkeypatch.setattr(InPlaceReduction, "begin", counted)
    return counts


def once_if_shared(hvd: ModuleType, tensors: int = 1) -> list[int]:
    """What `direct` holds after one reduction without staging; a job of one has nothing to reduce."""
    return [tensors] if hvd.size() > 1 else []


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name.lower())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32], ids=str)
def test_several_chunks_give_the_bits_that_staging_gives(
    hvd: ModuleType, direct: list[int], dtype: torch.dtype, op: ReduceOp
) -> None:
    generator = torch.Generator().manual_seed(hvd.rank())
    ordinary = (3 * torch.randn(LONG, generator=generator)).to(dtype)
    tensor = hvd.empty_shared(LONG, dtype=dtype).copy_(ordinary)
    hvd.allreduce_(ordinary, op=op, prescale_factor=0.7, name="ordinary")
    assert direct == []
    hvd.allreduce_(tensor, op=op, prescale_factor=0.7, name="shared")
    assert direct == once_if_shared(hvd)
    assert torch.equal(tensor, ordinary)


def transposed(tensor: Tensor) -> Tensor:
    return tensor.t()


def rows(tensor: Tensor) -> Tensor:
    return tensor[3:90]


def as_integers(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32).zero_()


@pytest.mark.parametrize("view", [transposed, rows, as_integers], ids=lambda view: view.__name__)
def test_views_of_the_same_place_need_no_staging(
    hvd: ModuleType, direct: list[int], view: Callable[[Tensor], Tensor]
) -> None:
    whole = hvd.empty_shared((100, 700)).zero_()
    part = view(whole)
    part += hvd.rank() + 1
    hvd.allreduce_(part, op=hvd.Sum)
    assert direct == once_if_shared(hvd)
    expected = torch.zeros(100, 700)
    view(expected).add_(sum(range(1, hvd.size() + 1)))
    assert torch.equal(whole, expected)


def test_a_tensor_with_gaps_is_reduced_all_the_same(hvd: ModuleType, direct: list[int]) -> None:
    whole = hvd.empty_shared(10, 6).zero_()
    hvd.allreduce_(whole[:, ::2].fill_(1.0), op=hvd.Sum)
    assert direct == []
    assert whole.sum() == 30 * hvd.size()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("length", [7, LONG], ids=["one chunk", "several chunks"])
@pytest.mark.parametrize("odd", [0, -1], ids=["first rank", "last rank"])
def test_one_rank_with_an_ordinary_tensor(hvd: ModuleType, direct: list[int], length: int, odd: int) -> None:
    tensor = hvd.empty_shared(length)
    if hvd.rank() == odd % hvd.size():
        tensor = torch.empty(length)
    for turn in range(3):
        tensor.fill_(hvd.rank() + turn)
        hvd.allreduce_(tensor, op=hvd.Sum)
        same(tensor, torch.full((length,), float(sum(range(turn, hvd.size() + turn)))))
    assert direct == []


@pytest.mark.mpi(min_size=2)
def test_other_places_on_some_rank_are_staged(hvd: ModuleType, direct: list[int]) -> None:
    first, second = hvd.empty_shared(500).zero_(), hvd.empty_shared(500).zero_()
    last = hvd.rank() == hvd.size() - 1
    hvd.allreduce_((first if last else second)[:400].fill_(1.0), op=hvd.Sum)
    hvd.allreduce_(first[40:440] if last else first[50:450], op=hvd.Sum)
    assert direct == []
    assert (first if last else second)[:400].eq(hvd.size()).all()
    hvd.allreduce_(first, op=hvd.Max)
    assert direct == [1]
    assert first[:40].eq(hvd.size()).all()


@pytest.mark.mpi(min_size=2)
def test_groups_of_both_kinds(hvd: ModuleType, direct: list[int]) -> None:
    shapes = [(LONG,), (40_000,), (20, 1000)]
    tensors = [hvd.empty_shared(shapes[0]), torch.empty(shapes[1]), hvd.empty_shared(shapes[2])]
    for turn in range(2):
        for seed, tensor in enumerate(tensors):
            tensor.copy_(contribution(hvd.rank(), shapes[seed], torch.float32, seed + turn))
        hvd.grouped_allreduce_(tensors, op=hvd.Sum)
        for seed, tensor in enumerate(tensors):
            inputs = [contribution(rank, shapes[seed], torch.float32, seed + turn) for rank in range(hvd.size())]
            same(tensor, reduced(hvd.Sum, inputs))
    assert direct == [2, 2]


def test_other_collectives_take_them_as_any_tensor(hvd: ModuleType) -> None:
    tensor = hvd.empty_shared(64, 8).fill_(hvd.rank())
    assert hvd.allgather(tensor).shape == (64 * hvd.size(), 8)
    assert hvd.allreduce(tensor, op=hvd.Adasum).shape == (64, 8)
    assert tensor.eq(hvd.rank()).all()
    hvd.broadcast_(tensor, hvd.size() - 1)
    assert tensor.eq(hvd.size() - 1).all()


def test_in_inference_mode(hvd: ModuleType, direct: list[int]) -> None:
    with torch.inference_mode():
        tensor = hvd.empty_shared(LONG).fill_(1.0)
        hvd.allreduce_(tensor, op=hvd.Sum)
        assert direct == once_if_shared(hvd)
    tensor.add_(1.0)
    assert tensor.eq(hvd.size() + 1).all()


@pytest.mark.parametrize(
    ("arguments", "shape"),
    [((), ()), ((3,), (3,)), ((2, 3), (2, 3)), (((2, 3),), (2, 3)), ((torch.Size([4]),), (4,)), ((0, 3), (0, 3))],
    ids=str,
)
def test_sizes_are_given_as_for_torch_empty(
    hvd: ModuleType, arguments: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    tensor = hvd.empty_shared(*arguments).fill_(1.0)
    assert tensor.shape == shape
    assert tensor.dtype is torch.get_default_dtype()
    assert hvd.allreduce_(tensor, op=hvd.Sum).eq(hvd.size()).all()


@pytest.mark.parametrize("arguments", [((2, 3),), (2, 3)], ids=str)
def test_the_dtype_may_stand_last(hvd: ModuleType, arguments: tuple[object, ...]) -> None:
    tensor = hvd.empty_shared(*arguments, torch.float64)
    assert (tensor.shape, tensor.dtype) == ((2, 3), torch.float64)


@pytest.mark.parametrize(
    ("arguments", "dtype", "text"),
    [
        *(((wrong,), None, "empty_shared: expected numbers") for wrong in (-1, 2.5, "3", None)),
        (((2, 3), 4), None, "empty_shared: expected numbers"),
        ((2, 3, torch.float64), torch.float32, r"expected one dtype, got torch\.float64 and dtype=torch\.float32"),
        ((3,), "float32", r"expected a torch\.dtype, got 'float32'"),
        ((3,), torch.qint8, "cannot be communicated"),
    ],
    ids=str,
)
def test_sizes_and_dtypes_that_are_none(
    hvd: ModuleType, arguments: tuple[object, ...], dtype: object, text: str
) -> None:
    with pytest.raises(UsageError, match=text):
        hvd.empty_shared(*arguments, dtype=dtype)


@pytest.mark.mpi(min_size=2)
def test_ranks_that_want_different_tensors(hvd: ModuleType) -> None:
    last = hvd.rank() == hvd.size() - 1
    with pytest.raises(ShapeMismatchError, match=r"passed \[300\].*passed \[301\]"):
        hvd.empty_shared(300 + last)
    with pytest.raises(MismatchError, match=r"float32.*float64"):
        hvd.empty_shared(300, dtype=torch.float64 if last else torch.float32)
    assert hvd.allreduce_(hvd.empty_shared(300).fill_(1.0), op=hvd.Sum).eq(hvd.size()).all()


def test_memory_that_cannot_be_had_is_an_error_on_every_rank(hvd: ModuleType) -> None:
    with pytest.raises(HorovodInternalError, match="cannot share"):
        hvd.empty_shared(1 << 46)
    assert hvd.allreduce_(hvd.empty_shared(300).fill_(1.0), op=hvd.Sum).eq(hvd.size()).all()


@pytest.mark.mpi(min_size=2)
def test_a_rank_may_let_go_before_the_others(hvd: ModuleType, direct: list[int]) -> None:
    tensor = hvd.empty_shared(LONG).fill_(1.0)
    if hvd.rank() == 0:
        tensor = torch.ones(LONG)
    hvd.allreduce_(tensor, op=hvd.Sum)
    hvd.allreduce_(tensor, op=hvd.Sum)
    assert direct == []
    assert tensor.eq(hvd.size() ** 2).all()


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def mappings() -> int:
    with open("/proc/self/maps") as file:
        return len(file.readlines())


def test_nothing_is_left_of_those_that_are_dropped(hvd: ModuleType) -> None:
    def use(times: int) -> None:
        for _ in range(times):
            tensor = hvd.empty_shared(1 << 18).fill_(1.0)
            hvd.allreduce_(tensor[1000:], op=hvd.Sum)

    use(20)
    gc.collect()
    files, maps, resident = len(os.listdir("/proc/self/fd")), mappings(), resident_bytes()
    use(100)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= files
    assert mappings() <= maps + 2
    # Each has a mebibyte; ten of the hundred would be seen.
    assert resident_bytes() - resident < 10 << 20


@pytest.mark.mpi(min_size=3)
def test_in_process_sets(hvd: ModuleType, direct: list[int]) -> None:
    pair = hvd.add_process_set([0, 2])
    try:
        everybody = hvd.empty_shared(LONG).fill_(1.0)
        if hvd.rank() in (0, 2):
            # A set of ranks that all have a copy: no staging, whichever set the tensor was made in.
            assert hvd.allreduce_(everybody, op=hvd.Sum, process_set=pair).eq(2.0).all()
            own = hvd.empty_shared(LONG, process_set=pair).fill_(3.0)
            assert hvd.allreduce_(own, op=hvd.Sum, process_set=pair).eq(6.0).all()
            assert direct == [1, 1]
        else:
            own = torch.full((LONG,), 6.0)
            assert everybody.eq(1.0).all()
        hvd.allreduce_(own, op=hvd.Max)
        assert own.eq(6.0).all()
        assert len(direct) == (2 if hvd.rank() in (0, 2) else 0)
    finally:
        hvd.remove_process_set(pair)


@pytest.mark.mpi(min_size=2)
def test_gradients_that_live_in_shared_memory(hvd: ModuleType, direct: list[int]) -> None:
    def train(flat: Tensor) -> list[Tensor]:
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(300, 400), torch.nn.Linear(400, 5))
        start = 0
        for parameter in model.parameters():
            parameter.grad = flat[start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(3):
            torch.manual_seed(100 * step + hvd.rank())
            optimizer.zero_grad(set_to_none=False)
            model(torch.randn(8, 300)).square().mean().backward()
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    length = 300 * 400 + 400 + 400 * 5 + 5
    expected = train(torch.zeros(length))
    assert direct == []
    got = train(hvd.empty_shared(length).zero_())
    assert direct == [4, 4, 4]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    direct.clear()
    flat = hvd.empty_shared(length).zero_()
    got = train(flat if hvd.rank() else torch.zeros(length))
    assert direct == []
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_ranks_that_help_each_other_give_the_same_bits(hvd: ModuleType) -> None:
    generator = torch.Generator().manual_seed(hvd.rank())
    length = hvd.size() * (LEAST_SHARED + 1) * 65536 + 11
    original = torch.randn(length, generator=generator)
    ordinary, tensor = original.clone(), hvd.empty_shared(length)
    for call in range(4):
        ordinary.copy_(original)
        tensor.copy_(original)
        hvd.allreduce_(ordinary, op=hvd.Average, name="large and ordinary")
        hvd.allreduce_(tensor, op=hvd.Average, name="large and shared")
        assert torch.equal(tensor, ordinary), call
    assert torch.equal(hvd.broadcast(tensor, 0, name="large bits"), tensor)
