"""Which reductions are defined where, and what a wrong request says."""

import pytest
import torch

from hvlike.backends.arithmetic.reduce_op import ReduceOp, check_supported, identity, reduce_op
from hvlike.errors import UsageError
from hvlike.transport.memory.dtypes import TABLE

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


def test_numbers_are_those_of_horovod() -> None:
    assert [op.name for op in ReduceOp] == ["AVERAGE", "SUM", "ADASUM", "MIN", "MAX", "PRODUCT"]
    assert [int(op) for op in ReduceOp] == [0, 1, 2, 3, 4, 5]


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


def test_refusal_says_what_is_possible() -> None:
    with pytest.raises(UsageError, match=r"op Average is not defined on dtype bool; possible there: Sum, Min, Max"):
        check_supported(ReduceOp.AVERAGE, torch.bool)
    with pytest.raises(UsageError, match="dtype uint16"):
        check_supported(ReduceOp.SUM, torch.uint16)


@pytest.mark.parametrize("value", [6, -1, "sum", None])
def test_no_such_op(value: object) -> None:
    with pytest.raises(UsageError, match=r"is not a reduction; expected one of: Average \(0\), Sum \(1\)"):
        reduce_op(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT])
@pytest.mark.parametrize("dtype", TABLE, ids=str)
def test_identity_changes_nothing(op: ReduceOp, dtype: torch.dtype) -> None:
    if op not in supported(dtype):
        return
    neutral = torch.full((2,), identity(op, dtype), dtype=dtype)
    values = torch.tensor([0, 1]).to(dtype)
    combined = {
        ReduceOp.SUM: torch.add,
        ReduceOp.AVERAGE: torch.add,
        ReduceOp.PRODUCT: torch.mul,
        ReduceOp.MIN: torch.minimum,
        ReduceOp.MAX: torch.maximum,
    }[op](values, neutral)
    assert torch.equal(combined, values)
