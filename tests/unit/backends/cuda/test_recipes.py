"""What NCCL is told to do for a reduction of ours, and what it is not asked for."""

import pytest
import torch

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.backends.cuda.nccl import Recipe, recipe_of
from hvlike.transport.memory.dtypes import TABLE

SUM, AVERAGE, MIN, MAX, PRODUCT = (
    ReduceOp.SUM,
    ReduceOp.AVERAGE,
    ReduceOp.MIN,
    ReduceOp.MAX,
    ReduceOp.PRODUCT,
)


@pytest.mark.parametrize(
    ("dtype", "op", "factors", "expected"),
    [
        (torch.float32, AVERAGE, {"divisor": 4}, Recipe("avg", 1, 1)),
        (torch.bfloat16, AVERAGE, {"divisor": 4, "prescale": 0.5, "postscale": 2}, Recipe("avg", 0.5, 2)),
        (torch.float16, SUM, {"postscale": 0.25}, Recipe("sum", 1, 0.25)),
        (torch.float64, AVERAGE, {"divisor": 2}, Recipe("sum", 1, 0.5)),
        (torch.float32, PRODUCT, {"prescale": 3}, Recipe("prod", 3, 1)),
        (torch.float32, MIN, {}, Recipe("min", 1, 1)),
        (torch.int32, SUM, {}, Recipe("sum", 1, 1)),
        (torch.int64, MAX, {}, Recipe("max", 1, 1)),
        (torch.int32, AVERAGE, {"divisor": 4}, None),
        (torch.int32, SUM, {"prescale": 2}, None),
        (torch.int16, SUM, {}, None),
        (torch.bool, SUM, {}, Recipe("max", 1, 1, torch.uint8)),
        (torch.bool, PRODUCT, {}, Recipe("min", 1, 1, torch.uint8)),
        (torch.complex64, AVERAGE, {"divisor": 4}, Recipe("avg", 1, 1, torch.float32)),
        (torch.complex128, SUM, {}, Recipe("sum", 1, 1, torch.float64)),
        (torch.complex64, PRODUCT, {}, None),
    ],
    ids=str,
)
def test_recipes(dtype: torch.dtype, op: ReduceOp, factors: dict[str, float], expected: Recipe | None) -> None:
    arithmetic = Arithmetic(
        dtype,
        op,
        divisor=int(factors.get("divisor", 1)),
        prescale=factors.get("prescale", 1.0),
        postscale=factors.get("postscale", 1.0),
    )
    assert recipe_of(arithmetic, 4) == expected


def test_a_recipe_sees_the_memory_as_it_is() -> None:
    for dtype in TABLE:
        recipe = recipe_of(Arithmetic(dtype, SUM), 4)
        if recipe is not None:
            tensor = torch.zeros(6, dtype=dtype)
            seen = recipe.view(tensor)
            assert (seen.data_ptr(), seen.nbytes, seen.dim()) == (tensor.data_ptr(), tensor.nbytes, 1)
