"""Random programs of many operations, submitted in another order on each rank, give what each operation alone gives."""

import random
from types import ModuleType
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.collectives.inputs import DTYPES, LAYOUTS, OPS, contribution, defined, reduced, same
from torch import Tensor

from hvlike import broadcast_async, broadcast_async_
from hvlike.collectives.api.gather_scatter import allgather_async

SHAPES = st.sampled_from([(), (0,), (1,), (5,), (3, 0, 2), (3, 4), (2, 3, 4, 5), (129, 67), (70_001,)])
FORMS = st.sampled_from(["allreduce", "allreduce_", "grouped", "grouped_", "broadcast", "broadcast_", "allgather"])


@st.composite
def operations(draw: st.DrawFn) -> dict[str, Any]:
    op, dtype = draw(st.sampled_from([(op, dtype) for op in OPS for dtype in DTYPES if defined(op, dtype)]))
    return {
        "form": draw(FORMS),
        "op": op,
        "dtype": dtype,
        "shape": draw(SHAPES),
        "layout": draw(st.integers(0, len(LAYOUTS) - 1)),
        "root": draw(st.integers(0, 11)),
        "seed": draw(st.integers(0, 99)),
    }


def submit(hvd: ModuleType, number: int, each: dict[str, Any], mine: list[Tensor]) -> Any:
    name = f"operation {number}"
    match each["form"]:
        case "allreduce":
            return hvd.allreduce_async(mine[0], op=each["op"], name=name)
        case "allreduce_":
            return hvd.allreduce_async_(mine[0], op=each["op"], name=name)
        case "grouped":
            return hvd.grouped_allreduce_async(mine, op=each["op"], name=name)
        case "grouped_":
            return hvd.grouped_allreduce_async_(mine, op=each["op"], name=name)
        case "broadcast":
            return broadcast_async(mine[0], each["root"] % hvd.size(), name=name)
        case "broadcast_":
            return broadcast_async_(mine[0], each["root"] % hvd.size(), name=name)
    return allgather_async(mine[0], name=name)


def parts(rank: int, each: dict[str, Any]) -> list[Tensor]:
    count = 2 if each["form"].startswith("grouped") else 1
    return [contribution(rank, each["shape"], each["dtype"], each["seed"] + index) for index in range(count)]


def expected(hvd: ModuleType, each: dict[str, Any]) -> list[Tensor]:
    everybody = [parts(rank, each) for rank in range(hvd.size())]
    if each["form"].startswith("broadcast"):
        return everybody[each["root"] % hvd.size()]
    if each["form"] == "allgather":
        return [torch.cat([rows[0].reshape(-1) if rows[0].dim() == 0 else rows[0] for rows in everybody])]
    return [reduced(each["op"], list(column)) for column in zip(*everybody, strict=True)]


@settings(max_examples=12)
@given(program=st.lists(operations(), min_size=1, max_size=12))
def test_programs(hvd: ModuleType, program: list[dict[str, Any]]) -> None:
    order = list(range(len(program)))
    random.Random(hvd.rank()).shuffle(order)
    given_tensors: dict[int, list[Tensor]] = {}
    handles: dict[int, Any] = {}
    for number in order:
        layout = LAYOUTS[(program[number]["layout"] + hvd.rank()) % len(LAYOUTS)]
        given_tensors[number] = [layout(part) for part in parts(hvd.rank(), program[number])]
        handles[number] = submit(hvd, number, program[number], given_tensors[number])
    for number, each in enumerate(program):
        result = hvd.synchronize(handles[number])
        results = result if isinstance(result, list) else [result]
        for got, wanted in zip(results, expected(hvd, each), strict=True):
            same(got, wanted)
        if each["form"].endswith("_"):
            assert all(got is mine for got, mine in zip(results, given_tensors[number], strict=True))
        else:
            for mine, was in zip(given_tensors[number], parts(hvd.rank(), each), strict=True):
                assert torch.equal(mine, was)
