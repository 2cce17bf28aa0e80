"""Which reductions are defined where, and laws of element arithmetic over dtype x op x factors x contributions.

Many elements are shared among as many threads as torch has where the rank has a core for each: the bits stay the same.
"""

import functools
import itertools
import math
import threading
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch

from hvlike.backends.arithmetic.arithmetic import THREADED_BYTES, THREADS, Arithmetic, Threads, early_factor
from hvlike.backends.arithmetic.kernels import BLOCK_BYTES
from hvlike.backends.arithmetic.reduce_op import BitwiseOp, ReduceOp, check_supported, identity, reduce_op
from hvlike.errors import UsageError
from hvlike.transport.memory.dtypes import TABLE, dtype_name

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
ELEMENTWISE = [op for op in ReduceOp if op is not ReduceOp.ADASUM]
FACTORS = [(1.0, 1.0), (0.5, 1.0), (1.0, 2.5), (0.75, 0.5)]
COUNTS = [1, 2, 3, 5]


def divisor_of(op: ReduceOp, count: int) -> int:
    return count if op is ReduceOp.AVERAGE else 1


def combined(arithmetic: Arithmetic, contributions: list[torch.Tensor]) -> torch.Tensor:
    own, *others = [tensor.clone() for tensor in contributions]
    arithmetic.combine(arithmetic.view(own), [arithmetic.view(other) for other in others])
    return own


def integers(dtype: torch.dtype, count: int) -> list[torch.Tensor]:
    low = 0 if dtype is torch.uint8 else -7
    generator = torch.Generator().manual_seed(count)
    return [torch.randint(low, 8, (50,), generator=generator).to(dtype) for _ in range(count)]


def numbers(dtype: torch.dtype, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return [torch.randn(50, generator=generator, dtype=wide).to(dtype) for _ in range(count)]


def reduced_by_torch(op: ReduceOp, tensors: list[torch.Tensor]) -> torch.Tensor:
    reduce = {ReduceOp.MIN: torch.minimum, ReduceOp.MAX: torch.maximum, ReduceOp.PRODUCT: torch.mul}.get(op, torch.add)
    return functools.reduce(reduce, tensors)


@pytest.mark.parametrize("dtype", INTEGERS, ids=dtype_name)
@pytest.mark.parametrize("op", ELEMENTWISE)
def test_integers_truncate_toward_zero_at_each_scaling(dtype: torch.dtype, op: ReduceOp) -> None:
    reduce = {ReduceOp.MIN: min, ReduceOp.MAX: max, ReduceOp.PRODUCT: lambda a, b: a * b}.get(op, lambda a, b: a + b)
    bits = dtype.itemsize * 8
    for (prescale, postscale), count in itertools.product(FACTORS, COUNTS):
        if op is ReduceOp.PRODUCT and count > 2:
            continue
        contributions = integers(dtype, count)
        divisor = divisor_of(op, count)
        arithmetic = Arithmetic(dtype, op, divisor=divisor, prescale=prescale, postscale=postscale)
        result = combined(arithmetic, contributions).tolist()
        for index, value in enumerate(result):
            scaled = [math.trunc(each[index].item() * Fraction(prescale)) for each in contributions]
            total = functools.reduce(reduce, scaled)
            expected = math.trunc(total * Fraction(postscale) / divisor)
            if -(1 << (bits - 1)) <= total < 1 << (bits - 1) and -(1 << (bits - 1)) <= expected < 1 << (bits - 1):
                assert value == expected, (prescale, postscale, count, scaled)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(
    ("op", "dtypes", "reduce"),
    [
        (BitwiseOp.BAND, [torch.bool, *INTEGERS], torch.bitwise_and),
        (BitwiseOp.BOR, [torch.bool, *INTEGERS], torch.bitwise_or),
        (BitwiseOp.BXOR, [torch.bool, *INTEGERS], torch.bitwise_xor),
        (ReduceOp.SUM, [torch.bool], torch.logical_or),
        (ReduceOp.MAX, [torch.bool], torch.logical_or),
        (ReduceOp.MIN, [torch.bool], torch.logical_and),
        (ReduceOp.PRODUCT, [torch.bool], torch.logical_and),
    ],
    ids=str,
)
def test_bits_and_truth(op: Any, dtypes: list[torch.dtype], reduce: Any, count: int) -> None:
    for dtype in dtypes:
        contributions = [tensor > 0 if dtype is torch.bool else tensor for tensor in integers(dtype, count)]
        assert torch.equal(combined(Arithmetic(dtype, op), contributions), functools.reduce(reduce, contributions))


def wide_reference(
    op: ReduceOp, contributions: list[torch.Tensor], prescale: float, postscale: float, divisor: int
) -> torch.Tensor:
    precise = torch.complex128 if contributions[0].is_complex() else torch.float64
    wide = [tensor.to(precise) * prescale for tensor in contributions]
    return reduced_by_torch(op, wide) * postscale / divisor


@pytest.mark.parametrize("dtype", FLOATS + COMPLEX, ids=dtype_name)
@pytest.mark.parametrize("op", ELEMENTWISE)
def test_floats_follow_the_reference(dtype: torch.dtype, op: ReduceOp) -> None:
    if dtype.is_complex and op in (ReduceOp.MIN, ReduceOp.MAX):
        return
    # 16-bit types are computed in float32 and rounded once: half a unit in the last place.
    half = dtype.itemsize == 2
    for (prescale, postscale), count in itertools.product(FACTORS, COUNTS):
        contributions = numbers(dtype, count)
        divisor = divisor_of(op, count)
        arithmetic = Arithmetic(dtype, op, divisor=divisor, prescale=prescale, postscale=postscale)
        result = combined(arithmetic, contributions)
        reference = wide_reference(op, contributions, prescale, postscale, divisor)
        precision = torch.finfo(dtype).eps
        tolerance = precision * (0.51 if half else 2 * count)
        torch.testing.assert_close(
            result.to(reference.dtype), reference, rtol=tolerance, atol=tolerance * (1e-2 if half else 1)
        )


LARGE = 2**53 + 1


@pytest.mark.parametrize(
    ("dtype", "factors", "contributions", "expected"),
    [
        pytest.param(torch.int32, {"prescale": 0.5}, [[1, 2, 3]] * 2, [0, 2, 2], id="Horovod's example of a prescale"),
        pytest.param(torch.int64, {"divisor": 1}, [[LARGE, -LARGE]], [LARGE, -LARGE], id="one beyond double"),
        pytest.param(torch.int64, {"divisor": 3}, [[LARGE, -LARGE]] * 3, [LARGE, -LARGE], id="three beyond double"),
        pytest.param(
            torch.int64, {"divisor": 49, "postscale": 3.0}, [[49, -49, 98]], [3, -3, 6], id="multiplied first"
        ),
        pytest.param(torch.int8, {"divisor": 128}, [[-128, 127]], [-1, 0], id="a divisor wider than the dtype"),
    ],
)
def test_scaled_integers_are_exact(
    dtype: torch.dtype, factors: dict[str, Any], contributions: list[list[int]], expected: list[int]
) -> None:
    op = ReduceOp.AVERAGE if "divisor" in factors else ReduceOp.SUM
    tensors = [torch.tensor(each, dtype=dtype) for each in contributions]
    assert combined(Arithmetic(dtype, op, **factors), tensors).tolist() == expected


def test_sixteen_bit_sums_do_not_stagnate_or_overflow() -> None:
    ones = [torch.ones(4, dtype=torch.bfloat16)] * 300
    assert combined(Arithmetic(torch.bfloat16, ReduceOp.SUM), ones).tolist() == [300.0] * 4
    large = [torch.full((4,), 40000.0, dtype=torch.float16)] * 2
    assert combined(Arithmetic(torch.float16, ReduceOp.AVERAGE, divisor=2), large).tolist() == [40000.0] * 4


@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_name)
@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX])
def test_nan_propagates_wherever_it_stands(dtype: torch.dtype, op: ReduceOp) -> None:
    nan = math.nan
    first = torch.tensor([nan, 1.0, 2.0], dtype=dtype)
    second = torch.tensor([1.0, nan, 3.0], dtype=dtype)
    for contributions in ([first, second], [second, first]):
        assert combined(Arithmetic(dtype, op), contributions).isnan().tolist() == [True, True, False]


@pytest.mark.parametrize("dtype", COMPLEX, ids=dtype_name)
def test_scaling_an_infinite_complex_number_makes_no_nan(dtype: torch.dtype) -> None:
    values = torch.tensor([complex(math.inf, 1.0)], dtype=dtype)
    result = combined(Arithmetic(dtype, ReduceOp.AVERAGE, divisor=2), [values])
    assert result.tolist() == [complex(math.inf, 0.5)]


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS, *COMPLEX], ids=dtype_name)
def test_overflow_is_silent(dtype: torch.dtype) -> None:
    # Warnings are errors in this run.
    if dtype.is_floating_point or dtype.is_complex:
        values = torch.full((3,), torch.finfo(dtype).max, dtype=dtype)
    else:
        values = torch.full((3,), torch.iinfo(dtype).max, dtype=dtype)
    for op in (ReduceOp.SUM, ReduceOp.PRODUCT):
        combined(Arithmetic(dtype, op, prescale=2.0, postscale=3.0), [values, values])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32], ids=dtype_name)
def test_long_pieces_are_worked_on_in_blocks(dtype: torch.dtype) -> None:
    length = 2 * BLOCK_BYTES // dtype.itemsize + 3
    arithmetic = Arithmetic(dtype, ReduceOp.AVERAGE, divisor=2, prescale=2.0)
    first, second = torch.arange(length).remainder(64).to(dtype), torch.ones(length, dtype=dtype)
    expected = ((first * 2 + second * 2).double() / 2).to(dtype)
    output = torch.zeros(length, dtype=dtype)
    pieces = [arithmetic.view(tensor) for tensor in (first, second, output)]
    arithmetic.combine(pieces[0], pieces[1:2], pieces[1:])
    for tensor in (first, second, output):
        assert torch.equal(tensor, expected)


def test_others_that_are_no_outputs_stay_as_they_are() -> None:
    for dtype in (torch.float32, torch.float16, torch.int64, torch.complex64):
        other = torch.tensor([3, 4]).to(dtype)
        arithmetic = Arithmetic(dtype, ReduceOp.SUM, prescale=0.5, postscale=4.0)
        arithmetic.combine(arithmetic.view(torch.ones(2, dtype=dtype)), [arithmetic.view(other)])
        assert torch.equal(other, torch.tensor([3, 4]).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.complex64], ids=dtype_name)
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.PRODUCT])
def test_two_halves_make_the_whole(dtype: torch.dtype, op: ReduceOp) -> None:
    contributions = [tensor.abs() if not dtype.is_complex else tensor for tensor in numbers(torch.complex64, 4)]
    tensors = [(tensor if dtype.is_complex else tensor.real * 2).to(dtype).contiguous() for tensor in contributions]
    arithmetic = Arithmetic(dtype, op, divisor=divisor_of(op, 4), prescale=2.0, postscale=0.5)
    expected = combined(arithmetic, tensors)
    first, second, third, fourth = [arithmetic.view(tensor) for tensor in tensors]
    arithmetic.combine(first, [second], partial=True)
    arithmetic.combine(third, [fourth], partial=True)
    arithmetic.continuation.combine(first, [third], partial=True)
    arithmetic.continuation.combine(first, [], [fourth])
    torch.testing.assert_close(tensors[0], expected)
    assert torch.equal(tensors[3], tensors[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=dtype_name)
@pytest.mark.parametrize("op", ELEMENTWISE)
@pytest.mark.parametrize("divisor", [1, 2, 3])
def test_sixteen_bit_arithmetic_in_place_gives_the_same_bits(dtype: torch.dtype, op: ReduceOp, divisor: int) -> None:
    arithmetic = Arithmetic(dtype, op, divisor=divisor)
    for count in COUNTS:
        contributions = numbers(dtype, count)
        expected = contributions[0].clone()
        own = arithmetic.view(expected)
        accumulator = arithmetic.begin(own, arithmetic.accumulator(len(own)))
        for other in contributions[1:]:
            arithmetic.fold(accumulator, arithmetic.view(other))
        arithmetic.end(accumulator, own)
        assert torch.equal(combined(arithmetic, contributions), expected)


@pytest.mark.parametrize("divisor", [4, 5, 1000])
def test_partial_averages_of_float16_do_not_overflow(divisor: int) -> None:
    arithmetic = Arithmetic(torch.float16, ReduceOp.AVERAGE, divisor=divisor, prescale=2.0, postscale=divisor / 4)
    tensors = [torch.full((3,), 30000.0, dtype=torch.float16) for _ in range(4)]
    first, second, third, fourth = map(arithmetic.view, tensors)
    arithmetic.combine(first, [second], partial=True)
    arithmetic.combine(third, [fourth], partial=True)
    assert tensors[0].isfinite().all()
    arithmetic.continuation.combine(first, [third])
    assert tensors[0].tolist() == [60000.0] * 3


@pytest.mark.parametrize(
    ("op", "post", "factor"),
    [
        (ReduceOp.AVERAGE, 1 / 4, 1 / 4),
        (ReduceOp.AVERAGE, 1 / 3, 1 / 4),
        (ReduceOp.SUM, -0.6, 0.5),
        (ReduceOp.SUM, 1.0, 1.0),
        (ReduceOp.SUM, 8.0, 1.0),
        (ReduceOp.SUM, 0.0, 1.0),
        (ReduceOp.PRODUCT, 0.25, 1.0),
    ],
)
def test_table_of_early_factors(op: ReduceOp, post: float, factor: float) -> None:
    assert early_factor(op, post) == factor


def test_tensors_of_inference_mode_work_in_and_out_of_it() -> None:
    arithmetic = Arithmetic(torch.bfloat16, ReduceOp.SUM)
    with torch.inference_mode():
        inside = torch.ones(3, dtype=torch.bfloat16)
        piece = arithmetic.view(inside)
        arithmetic.combine(piece[:3], [piece[0:3]])
    arithmetic.combine(piece, [arithmetic.view(torch.ones(3, dtype=torch.bfloat16))])
    assert inside.tolist() == [3.0] * 3


@pytest.mark.parametrize(
    ("dtype", "op", "factors", "message"),
    [
        (torch.bool, ReduceOp.AVERAGE, {}, "possible there: Sum, Min, Max, Product"),
        (torch.float16, BitwiseOp.BXOR, {}, "op Bxor is not defined on dtype float16; possible there: Average, Sum"),
        (torch.bool, ReduceOp.SUM, {"prescale": 0.5}, "takes no factors, got prescale 0.5"),
        (torch.complex64, ReduceOp.MAX, {}, "op Max is not defined on dtype complex64"),
        (torch.float32, ReduceOp.ADASUM, {}, "Adasum is not an element-wise reduction"),
        (torch.int32, ReduceOp.SUM, {"postscale": math.inf}, "expected finite factors for int32"),
        (torch.float32, ReduceOp.SUM, {"divisor": 0}, "expected a divisor of at least 1, got 0"),
    ],
    ids=str,
)
def test_refused(dtype: torch.dtype, op: Any, factors: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Arithmetic(dtype, op, **factors)
    with pytest.raises(UsageError, match="expected a tensor of float32, got float64"):
        Arithmetic(torch.float32, ReduceOp.SUM).view(torch.zeros(2, dtype=torch.float64))


ORDERED = [ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT]


def supported(dtype: torch.dtype) -> set[ReduceOp]:
    found = set()
    for op in ReduceOp:
        try:
            check_supported(op, dtype)
        except UsageError:
            continue
        found.add(op)
    return found


@pytest.mark.parametrize(
    ("dtypes", "ops"),
    [
        ([torch.bool], {*ORDERED}),
        ([torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], {*ORDERED, ReduceOp.AVERAGE}),
        ([torch.float16, torch.bfloat16, torch.float32, torch.float64], set(ReduceOp)),
        ([torch.complex64, torch.complex128], {ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.PRODUCT}),
    ],
    ids=["bool", "integer", "float", "complex"],
)
def test_table_of_ops(dtypes: list[torch.dtype], ops: set[ReduceOp]) -> None:
    for dtype in dtypes:
        assert supported(dtype) == ops


def test_dtypes_that_cannot_be_reduced_are_named() -> None:
    with pytest.raises(UsageError, match="dtype uint16"):
        check_supported(ReduceOp.SUM, torch.uint16)


@pytest.mark.parametrize("value", [6, -1, "sum", None])
def test_numbers_are_those_of_horovod_and_others_are_refused(value: object) -> None:
    assert [op.name for op in ReduceOp] == ["AVERAGE", "SUM", "ADASUM", "MIN", "MAX", "PRODUCT"]
    assert [int(op) for op in ReduceOp] == [0, 1, 2, 3, 4, 5]
    with pytest.raises(UsageError, match=r"is not a reduction; expected one of: Average \(0\), Sum \(1\)"):
        reduce_op(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT])
@pytest.mark.parametrize("dtype", TABLE, ids=str)
def test_identity_changes_nothing(op: ReduceOp, dtype: torch.dtype) -> None:
    if op not in supported(dtype):
        return
    neutral = torch.full((2,), identity(op, dtype), dtype=dtype)
    values = torch.tensor([0, 1]).to(dtype)
    assert torch.equal(reduced_by_torch(op, [values, neutral]), values)


SPECIAL = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0, 3e38, 1e-40]


@pytest.fixture
def two_threads() -> Iterator[None]:
    before, cores = torch.get_num_threads(), THREADS.cores
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
    THREADS.cores = cores


@pytest.mark.parametrize(("threads", "cores", "expected"), [(1, 4.0, 1), (2, 1.0, 1), (2, 2.0, 2), (4, 3.5, 1)])
@pytest.mark.usefixtures("two_threads")
def test_never_more_than_the_cores_of_the_rank(threads: int, cores: float, expected: int) -> None:
    torch.set_num_threads(threads)
    known = Threads()
    known.cores = cores
    assert known.usable() == expected


@pytest.mark.usefixtures("two_threads")
def test_beside_the_main_thread_there_is_one() -> None:
    known, found = Threads(), []
    known.cores = 2.0
    beside = threading.Thread(target=lambda: found.append(known.usable()))
    beside.start()
    beside.join()
    assert (found, known.usable()) == ([1], 2)


def contributions(dtype: torch.dtype, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    length = THREADED_BYTES // dtype.itemsize + 4321
    if not (dtype.is_floating_point or dtype.is_complex):
        return [torch.randint(-(2**62), 2**62, (length,), generator=generator).to(dtype) for _ in range(count)]
    tensors = [torch.randn(length, generator=generator, dtype=torch.float64).to(dtype) for _ in range(count)]
    for index, values in enumerate(zip(*itertools.product(SPECIAL, repeat=2), strict=True)):
        tensors[index][: len(values)] = torch.tensor(values).to(dtype)
    return tensors


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.complex64], ids=dtype_name)
@pytest.mark.parametrize(
    ("op", "divisor", "count"), [(ReduceOp.SUM, 1, 2), (ReduceOp.AVERAGE, 3, 3), (ReduceOp.PRODUCT, 1, 2)]
)
@pytest.mark.usefixtures("two_threads")
def test_the_bits_do_not_depend_on_the_threads(dtype: torch.dtype, op: ReduceOp, divisor: int, count: int) -> None:
    arithmetic = Arithmetic(dtype, op, divisor=divisor)
    given, found = contributions(dtype, count), []
    for cores in (1.0, 2.0):
        THREADS.cores = cores
        at_once, by_and_by = [each.clone() for each in given], [each.clone() for each in given]
        own, *others = map(arithmetic.view, at_once)
        arithmetic.combine(own, others, others[:1])
        own, *others = map(arithmetic.view, by_and_by)
        accumulator = arithmetic.begin(own, arithmetic.accumulator(len(own)))
        for other in others:
            arithmetic.fold(accumulator, other)
        arithmetic.end(accumulator, own)
        found.append([each.view(torch.uint8) for each in (*at_once[:2], by_and_by[0])])
    assert all(itertools.starmap(torch.equal, zip(*found, strict=True)))
