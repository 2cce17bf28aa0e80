"""Adasum on any number of ranks: its tree, the definition in float64 over it, and the laws that give it its name.

The ranks are coroutines that take turns in one process, on a backend that is a table.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.adasum_reference import adasum
from torch import Tensor

from hvlike.backends.adasum import BLOCK_ELEMENTS, Adasum, coefficients, dot_products, pair_up
from hvlike.backends.arithmetic.arithmetic import Arithmetic

SIZES = range(1, 10)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass
class Table:
    """What the ranks of one group have laid down in each round."""

    size: int
    rounds: dict[int, dict[int, Any]] = field(default_factory=dict)


@dataclass
class TableBackend:
    """One rank's backend: lays its part on the table, waits for the others', takes what it needs."""

    table: Table
    rank: int
    number: int = 0

    def _meet(self, part: Any) -> Iterator[Any]:
        parts = self.table.rounds.setdefault(self.number, {})
        self.number += 1
        parts[self.rank] = part
        while len(parts) < self.table.size:
            yield
        return [parts[rank] for rank in range(self.table.size)]

    def allreduce(self, tensors: Sequence[Tensor], arithmetic: Arithmetic) -> Iterator[Any]:
        everybody = yield from self._meet([tensor.clone() for tensor in tensors])
        for index, tensor in enumerate(tensors):
            tensor.copy_(sum(parts[index] for parts in everybody))

    def alltoall(self, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> Iterator[Any]:
        everybody = yield from self._meet([tensor.clone() for tensor in sends])
        for receive, parts in zip(receives, everybody, strict=True):
            receive.copy_(parts[self.rank])

    def gather(self, tensors: Sequence[Tensor], owners: Sequence[int]) -> Iterator[Any]:
        everybody = yield from self._meet([tensor.clone() for tensor in tensors])
        for index, owner in enumerate(owners):
            tensors[index].copy_(everybody[owner][index])


def reduce_over(inputs: list[list[Tensor]], prescale: float = 1.0, postscale: float = 1.0) -> list[Tensor]:
    """Reduce the tensors of all ranks; checks that all get the same bits, returns those of one."""
    size = len(inputs)
    table = Table(size)
    work = [[tensor.clone() for tensor in tensors] for tensors in inputs]
    coroutines: list[Any] = [
        Adasum(rank, size, prescale, postscale).allreduce(TableBackend(table, rank), work[rank]) for rank in range(size)
    ]
    while coroutines:
        coroutines = [each for each in coroutines if next(each, "done") != "done"]
    for tensors in work:
        for mine, first in zip(tensors, work[0], strict=True):
            assert torch.equal(mine.view(torch.uint8), first.view(torch.uint8))
    return work[0]


def random_tensors(lengths: Sequence[int], rank: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(length, generator=generator, dtype=torch.float64).to(dtype) for length in lengths]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_it_follows_the_definition_for_each_tensor_by_itself(size: int, dtype: torch.dtype) -> None:
    inputs = [random_tensors([7, 0, 1, 40, 3], rank, dtype) for rank in range(size)]
    results = reduce_over(inputs)
    for index, result in enumerate(results):
        expected = adasum([tensors[index] for tensors in inputs])
        torch.testing.assert_close(result, expected.to(dtype))


def test_vectors_longer_than_a_block() -> None:
    inputs = [random_tensors([5, 3 * BLOCK_ELEMENTS + 17], rank) for rank in range(3)]
    for index, result in enumerate(reduce_over(inputs)):
        torch.testing.assert_close(result, adasum([tensors[index] for tensors in inputs]))


def test_dot_products_do_not_lose_small_terms() -> None:
    values = torch.cat([torch.full((1,), 1e4), torch.full((3 * BLOCK_ELEMENTS,), 1e-2)])
    assert dot_products(values, values)[2].item() == pytest.approx(1e8 + 3 * BLOCK_ELEMENTS * 1e-4, rel=1e-9)


@pytest.mark.parametrize("size", SIZES)
def test_equal_vectors_give_the_same_vector_and_orthogonal_ones_their_sum(size: int) -> None:
    (vector,) = random_tensors([30], size, torch.float32)
    (same,) = reduce_over([[vector]] * size)
    torch.testing.assert_close(same, vector)
    axes = [[axis] for axis in torch.eye(size, dtype=torch.float64) * torch.arange(1.0, size + 1)]
    (total,) = reduce_over(axes)
    assert total.tolist() == [*range(1, size + 1)]


@pytest.mark.parametrize("size", SIZES)
def test_beside_zero_vectors_the_other_one_stays_as_it_is(size: int) -> None:
    (vector,) = random_tensors([11], size, torch.float32)
    for place in range(size):
        inputs = [[vector if rank == place else torch.zeros(11)] for rank in range(size)]
        (result,) = reduce_over(inputs)
        assert torch.equal(result, vector)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("scale", [1e-3, 7.0, -2.0])
def test_scaling_all_vectors_scales_the_result(size: int, scale: float) -> None:
    inputs = [random_tensors([13], rank) for rank in range(size)]
    (plain,) = reduce_over(inputs)
    for factors in ({"prescale": scale}, {"postscale": scale}):
        (scaled,) = reduce_over(inputs, **factors)
        torch.testing.assert_close(scaled, plain * scale)


def test_16_bit_vectors_whose_squares_would_overflow() -> None:
    inputs = [[torch.full((1000,), 3e4, dtype=torch.float16)] for _ in range(3)]
    (result,) = reduce_over(inputs)
    assert torch.equal(result, inputs[0][0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_on_one_rank_shows_in_the_result(bad: float) -> None:
    inputs = [[torch.ones(5), torch.ones(2)] for _ in range(3)]
    inputs[1][0][4] = bad
    results = reduce_over(inputs)
    assert not results[0].isfinite().all()
    assert results[1].tolist() == [1.0, 1.0]


def test_coefficients() -> None:
    dots = torch.tensor([[4.0, 9.0, 0.0], [4.0, 4.0, 4.0], [0.0, 9.0, 0.0], [1.0, 4.0, 2.0]], dtype=torch.float64)
    assert coefficients(dots).tolist() == [[1.0, 1.0], [0.5, 0.5], [1.0, 1.0], [0.0, 0.75]]


@given(count=st.integers(1, 5000))
def test_all_become_one_at_the_first_place_in_as_few_levels_as_can_be(count: int) -> None:
    left = set(range(count))
    levels = pair_up(count)
    for pairs in levels:
        used = [position for pair in pairs for position in pair]
        assert len(used) == len(set(used))
        assert left.issuperset(used)
        left -= {second for _, second in pairs}
    assert left == {0}
    assert len(levels) == (count - 1).bit_length()
