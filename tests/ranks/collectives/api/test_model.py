"""Every collective does what its definition says: a model of all of them, whichever way they go.

hypothesis draws the same on every rank: kinds, ops, shapes, layouts, factors, process sets and orders, for each dtype
and way. What every rank puts in is a function of the draw, so each rank computes for itself what must come out.
"""

import random
import traceback
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.collectives.inputs import DTYPES, FLOATS, OPS, SHAPES, chunk_shapes, defined
from support.collectives.operations import FORMS, KINDS, REDUCING, SCATTERING, Operation
from support.pretended_nodes import WAYS, going

from hvlike import Adasum, ProcessSet

pytestmark = [pytest.mark.differs_by_ranks(2, 4), pytest.mark.rests_on_mpi]

FACTORS = [(1.0, 1.0), (0.5, 1.0), (1.0, 2.0), (2.0, 0.5), (3, 1)]
MOST = 8
"""Operations at once."""


@pytest.fixture(scope="module")
def way(request: pytest.FixtureRequest, hvd: ModuleType) -> Iterator[str]:
    """The way that collectives go."""
    ranks = WAYS[request.param].ranks_per_node
    if hvd.size() <= (ranks or 0):
        pytest.skip("all ranks would be on one node")
    with going(hvd, WAYS[request.param]):
        yield request.param


@pytest.fixture(scope="module")
def sets(hvd: ModuleType, way: str) -> Iterator[list[ProcessSet | None]]:
    """All ranks; ranks that overlap; two that do not. Each exists once."""
    size = hvd.size()
    wanted = [range(0, size, 2), range(1, size, 2), [0, size - 1], range(1, size)]
    different = {tuple(sorted(set(ranks))) for ranks in wanted} - {tuple(range(size)), ()}
    added = [hvd.add_process_set(list(ranks)) for ranks in sorted(different)]
    # Half of all operations are of all ranks.
    yield [None, *(where for each in added for where in (each, None))]
    for each in added:
        assert hvd.remove_process_set(each)


@st.composite
def operations(draw: st.DrawFn, dtype: torch.dtype) -> Operation:
    kind = draw(st.sampled_from(KINDS))
    ops = [op for op in OPS if defined(op, dtype)]
    ops += [Adasum] if dtype in FLOATS and kind in REDUCING else []
    op = draw(st.sampled_from(ops))
    reduces = kind in (*REDUCING, *SCATTERING) and op is not Adasum and dtype is not torch.bool
    prescale, postscale = draw(st.sampled_from(FACTORS)) if reduces else FACTORS[0]
    return Operation(
        kind,
        op,
        dtype,
        draw(st.sampled_from([*SHAPES * 4, *chunk_shapes(dtype)])),
        draw(st.integers(0, len(FORMS) - 1)),
        draw(st.integers(0, 99)),
        prescale,
        postscale,
        *draw(st.tuples(st.booleans(), st.booleans(), st.booleans())),
    )


Program = list[tuple[Operation, int, bool]]
"""Operations, each with the number of its process set, and whether it is named."""


def order_of(rank: int, program: Program) -> list[int]:
    """The order of this rank: what blocks or has no name comes in the same order everywhere, the rest in any."""
    order = [index for index, (operation, _, named) in enumerate(program) if operation.waits or not named]
    dice = random.Random(rank)
    for index in set(range(len(program))) - set(order):
        order.insert(dice.randrange(len(order) + 1), index)
    return order


def run(hvd: ModuleType, sets: list[ProcessSet | None], program: Program) -> None:
    flying: list[tuple[Any, Operation, list[torch.Tensor], list[int]]] = []
    for index in order_of(hvd.rank(), program):
        operation, number, named = program[index]
        where = sets[number % len(sets)]
        ranks = list(range(hvd.size())) if where is None else list(where.ranks or ())
        if hvd.rank() in ranks:
            tensors = operation.given(hvd.rank(), ranks, hvd, where)
            handle = operation.submit(hvd, tensors, f"law {index}" if named else None, ranks, where)
            flying.append((handle, operation, tensors, ranks))
            if number % 2 and not operation.waits:
                hvd.poll(handle)
    random.Random(100 + hvd.rank()).shuffle(flying)
    for handle, operation, tensors, ranks in flying:
        result = handle if operation.waits else hvd.synchronize(handle)
        operation.check(result, tensors, hvd.rank(), ranks)


@pytest.mark.parametrize("way", WAYS, indirect=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=2, phases=[Phase.generate], report_multiple_bugs=False)
@given(data=st.data(), together=st.booleans())
def test_programs(
    hvd: ModuleType, sets: list[ProcessSet | None], dtype: torch.dtype, data: st.DataObject, together: bool
) -> None:
    """Twice, as a call that is known may take another way."""
    drawn = st.tuples(operations(dtype), st.integers(0, 11), st.booleans())
    program = data.draw(st.lists(drawn, min_size=2, max_size=MOST))
    failure = ""
    parts = [program] if together else [[each] for each in program]
    for part in parts + parts:
        try:
            run(hvd, sets, part)
        except Exception:  # noqa: PERF203  # The other ranks go on, too.
            failure += f"rank {hvd.rank()}: {traceback.format_exc()}"
    # All fail in the same way or none: what comes next must be the same on every rank.
    failures = "".join(hvd.allgather_object(failure))
    assert not failures, failures


@settings(max_examples=6)
@given(dtype=st.sampled_from(DTYPES), data=st.data(), numbers=st.lists(st.integers(0, 11), min_size=1, max_size=3))
@pytest.mark.parametrize("way", ["shared"], indirect=True)
def test_barriers_pass_operations_in_flight(
    hvd: ModuleType, sets: list[ProcessSet | None], dtype: torch.dtype, data: st.DataObject, numbers: list[int]
) -> None:
    operation, ranks = data.draw(operations(dtype).filter(lambda each: not each.waits)), list(range(hvd.size()))
    tensors = operation.given(hvd.rank(), ranks)
    first = hvd.rank() % 2 == 0
    handle = operation.submit(hvd, tensors, "before or after", ranks, None) if first else None
    for number in numbers:
        where = sets[number % len(sets)]
        if where is None or hvd.rank() in (where.ranks or ()):
            hvd.barrier(process_set=where)
    if handle is None:
        handle = operation.submit(hvd, tensors, "before or after", ranks, None)
    operation.check(hvd.synchronize(handle), tensors, hvd.rank(), ranks)
