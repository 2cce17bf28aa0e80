"""Threads of additions: as many as torch has where the rank has a core for each, and the same bits with any number."""

import itertools
import threading
from collections.abc import Iterator

import pytest
import torch

from hvlike.backends.arithmetic.arithmetic import THREADED_BYTES, THREADS, Arithmetic, Threads
from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.transport.memory.dtypes import dtype_name

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.complex64]
SPECIAL = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0, 3e38, 1e-40]


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    before, cores = torch.get_num_threads(), THREADS.cores
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
    THREADS.cores = cores


@pytest.mark.parametrize(("threads", "cores", "expected"), [(1, 4.0, 1), (2, 1.0, 1), (2, 2.0, 2), (4, 3.5, 1)])
def test_never_more_than_the_cores_of_the_rank(threads: int, cores: float, expected: int) -> None:
    torch.set_num_threads(threads)
    known = Threads()
    known.cores = cores
    assert known.usable() == expected


def test_one_beside_the_main_thread() -> None:
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


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize(
    ("op", "divisor", "count"), [(ReduceOp.SUM, 1, 2), (ReduceOp.AVERAGE, 3, 3), (ReduceOp.PRODUCT, 1, 2)]
)
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
