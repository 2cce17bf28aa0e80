"""Every collective does what its definition says, for drawn ops, dtypes, shapes, layouts, process sets and orders.

hypothesis draws the same on every rank; what every rank puts in is a function of the draw, so each rank computes for
itself what must come out.
"""

import random
from collections.abc import Iterator
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.collectives.inputs import DTYPES, FLOATS, OPS, defined
from support.collectives.operations import KINDS, SCATTERING, Operation

from hvlike import Adasum, Average, ProcessSet, Sum

SHAPES = st.sampled_from([(), (0,), (1,), (5,), (3, 0, 2), (3, 4), (2, 3, 4, 5), (129, 67), (70_001,)])
REDUCTIONS = [(op, dtype) for op in OPS for dtype in DTYPES if defined(op, dtype)]
REDUCTIONS += [(Adasum, dtype) for dtype in FLOATS]
SUMS = [(op, dtype) for op, dtype in REDUCTIONS if op in (Sum, Average)]


@st.composite
def operations(draw: st.DrawFn) -> Operation:
    kind = draw(st.sampled_from(KINDS))
    op, dtype = draw(st.sampled_from(SUMS if kind in SCATTERING else REDUCTIONS))
    return Operation(kind, op, dtype, draw(SHAPES), draw(st.integers(0, 4)), draw(st.integers(0, 99)))


@pytest.fixture(scope="module")
def sets(hvd: ModuleType) -> Iterator[list[ProcessSet | None]]:
    """All ranks; ranks that overlap; two that do not. Each exists once."""
    size = hvd.size()
    wanted = [range(0, size, 2), range(1, size, 2), [0, size - 1], range(1, size)]
    different = {tuple(sorted(set(ranks))) for ranks in wanted} - {tuple(range(size)), ()}
    added = [hvd.add_process_set(list(ranks)) for ranks in sorted(different)]
    yield [None, *added]
    for each in added:
        assert hvd.remove_process_set(each)


def ranks_of(hvd: ModuleType, where: ProcessSet | None) -> list[int]:
    return list(range(hvd.size())) if where is None else list(where.ranks or ())


@settings(max_examples=80)
@given(operation=operations(), number=st.integers(0, 11))
def test_one_operation_twice(hvd: ModuleType, sets: list[ProcessSet | None], operation: Operation, number: int) -> None:
    where = sets[number % len(sets)]
    ranks = ranks_of(hvd, where)
    if hvd.rank() not in ranks:
        return
    for _ in range(2):
        tensors = operation.given(hvd.rank(), ranks)
        handle = operation.submit(hvd, tensors, None, ranks, where)
        operation.check(hvd.synchronize(handle), tensors, hvd.rank(), ranks)


@settings(max_examples=15)
@given(program=st.lists(st.tuples(operations(), st.integers(0, 11), st.booleans()), min_size=2, max_size=14))
def test_many_at_once_in_another_order_on_each_rank(
    hvd: ModuleType, sets: list[ProcessSet | None], program: list[tuple[Operation, int, bool]]
) -> None:
    order = list(range(len(program)))
    random.Random(hvd.rank()).shuffle(order)
    flying = []
    for index in order:
        operation, number, polled = program[index]
        where = sets[number % len(sets)]
        ranks = ranks_of(hvd, where)
        if hvd.rank() in ranks:
            tensors = operation.given(hvd.rank(), ranks)
            flying.append((operation.submit(hvd, tensors, f"law {index}", ranks, where), operation, tensors, ranks))
            if polled:
                hvd.poll(flying[-1][0])
    random.Random(100 + hvd.rank()).shuffle(flying)
    for handle, operation, tensors, ranks in flying:
        operation.check(hvd.synchronize(handle), tensors, hvd.rank(), ranks)


@settings(max_examples=20)
@given(operation=operations(), numbers=st.lists(st.integers(0, 11), min_size=1, max_size=3))
def test_barriers_pass_operations_in_flight(
    hvd: ModuleType, sets: list[ProcessSet | None], operation: Operation, numbers: list[int]
) -> None:
    ranks = ranks_of(hvd, None)
    tensors = operation.given(hvd.rank(), ranks)
    first = hvd.rank() % 2 == 0
    handle = operation.submit(hvd, tensors, "before or after", ranks, None) if first else None
    for number in numbers:
        where = sets[number % len(sets)]
        if hvd.rank() in ranks_of(hvd, where):
            hvd.barrier(process_set=where)
    if handle is None:
        handle = operation.submit(hvd, tensors, "before or after", ranks, None)
    operation.check(hvd.synchronize(handle), tensors, hvd.rank(), ranks)
