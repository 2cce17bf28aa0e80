"""allgather, alltoall and reducescatter: what is refused on one rank, and what on all because the ranks differ."""

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

from hvlike.errors import HorovodInternalError, MismatchError, ShapeMismatchError, UsageError

Call = Callable[[ModuleType], Any]

REFUSED: dict[str, tuple[Call, str]] = {
    "no tensor": (lambda hvd: hvd.alltoall([1.0]), "expected a torch.Tensor, got list."),
    "number of splits": (
        lambda hvd: hvd.alltoall(torch.ones(9), splits=[0] * (hvd.size() + 1), name="x"),
        "alltoall 'x': Number of entries in splits does not equal number of workers. Got",
    ),
    "sum of splits": (
        lambda hvd: hvd.alltoall(torch.ones(3), splits=[4] * hvd.size(), name="x"),
        "Sum of splits entries is greater than the first dimension of tensor. Got [4",
    ),
    "negative splits": (
        lambda hvd: hvd.alltoall(torch.ones(3), splits=[-1] + [1] * (hvd.size() - 1)),
        "expected no negative entry in splits, got [-1",
    ),
    "float splits": (
        lambda hvd: hvd.alltoall(torch.ones(3), splits=[1.0] * hvd.size()),
        "alltoall expects splits to contain 32-bit integer elements, or 64-bit ones; got [1.0",
    ),
    "float tensor of splits": (
        lambda hvd: hvd.alltoall_async(torch.ones(3), splits=torch.ones(hvd.size())),
        "alltoall expects splits to contain 32-bit integer elements, or 64-bit ones, in one dimension; got torch.float",
    ),
    "splits of two dimensions": (
        lambda hvd: hvd.alltoall(torch.ones(3), splits=torch.zeros(hvd.size(), 1, dtype=torch.int32)),
        "in one dimension; got torch.int32 of shape",
    ),
    "0-dim alltoall": (
        lambda hvd: hvd.alltoall(torch.tensor(1.0), splits=[0] * hvd.size(), name="x"),
        "alltoall 'x': expected at least one dimension, got shape []",
    ),
    "0-dim reducescatter": (
        lambda hvd: hvd.reducescatter(torch.tensor(1.0), name="x"),
        "reducescatter 'x': Reducescatter does not support scalar inputs",
    ),
    "0-dim in a group": (
        lambda hvd: hvd.grouped_reducescatter_async([torch.ones(2), torch.tensor(1.0)], name="x"),
        "grouped_reducescatter 'x' (tensor 1): Reducescatter does not support scalar inputs",
    ),
    "Adasum": (
        lambda hvd: hvd.reducescatter(torch.ones(2), op=hvd.Adasum, name="x"),
        "reducescatter 'x': op Adasum is not defined on rows; possible: Average",
    ),
    "no such op": (lambda hvd: hvd.reducescatter(torch.ones(2), op=99), "op 99 is not a reduction"),
    "Average of bool": (lambda hvd: hvd.reducescatter(torch.ones(2).bool()), "op Average is not defined on dtype bool"),
    "unsupported dtype": (
        lambda hvd: hvd.allgather(torch.ones(2).to(torch.float8_e5m2), name="x"),
        "allgather 'x': dtype float8_e5m2 cannot be communicated",
    ),
    "sparse": (lambda hvd: hvd.reducescatter(torch.eye(2).to_sparse()), "expected a dense tensor"),
    "empty group of gathers": (
        lambda hvd: hvd.grouped_allgather([]),
        "grouped_allgather: expected at least one tensor, got an empty list.",
    ),
    "empty group of reductions": (
        lambda hvd: hvd.grouped_reducescatter([]),
        "grouped_reducescatter: expected at least one tensor, got an empty list.",
    ),
    "dense tensor in a sparse reduction": (
        lambda hvd: hvd.sparse_allreduce_async(torch.ones(2), name="x"),
        "sparse_allreduce 'x': expected a sparse COO tensor, got layout torch.strided",
    ),
    "Max of sparse tensors": (
        lambda hvd: hvd.sparse_allreduce_async(torch.eye(2).to_sparse(), name="x", op=hvd.Max),
        "sparse_allreduce 'x': op Max is not defined on sparse tensors; possible: Average, Sum.",
    ),
    "unregistered process set": (
        lambda hvd: hvd.alltoall(torch.ones(2), process_set=hvd.ProcessSet([0])),
        "Alltoall: Process set provided does not exist, or has not been registered",
    ),
}


def goes_on(hvd: ModuleType) -> None:
    """Unnamed operations of every kind still meet."""
    size = hvd.size()
    assert hvd.allgather(torch.tensor([hvd.rank()])).tolist() == list(range(size))
    assert hvd.alltoall(torch.full((size,), hvd.rank())).tolist() == list(range(size))
    assert hvd.reducescatter(torch.ones(size), op=hvd.Sum).tolist() == [size]
    assert hvd.grouped_allgather([torch.tensor(1)])[0].tolist() == [1] * size
    assert hvd.grouped_reducescatter([torch.ones(size)], op=hvd.Sum)[0].tolist() == [size]


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_a_wrong_argument_is_refused_with_a_reason(hvd: ModuleType, case: tuple[Call, str]) -> None:
    call, text = case
    with pytest.raises(UsageError) as raised:
        call(hvd)
    assert isinstance(raised.value, ValueError)
    assert text in str(raised.value)
    goes_on(hvd)


@pytest.mark.mpi(min_size=2)
def test_rows_that_cannot_be_divided(hvd: ModuleType) -> None:
    text = "splits not provided, but first dimension of tensor is not an even multiple of the number of workers"
    with pytest.raises(ValueError, match=text):
        hvd.alltoall(torch.ones(hvd.size() + 1))
    goes_on(hvd)


class Misuse(NamedTuple):
    call: Callable[[ModuleType, bool], Any]
    """Called on every rank; True on the last rank, the odd one."""
    error: type[HorovodInternalError]
    text: str


DIFFERING: dict[str, Misuse] = {
    "rows of an alltoall": Misuse(
        lambda hvd, odd: hvd.alltoall(torch.ones(hvd.size(), 2 + odd), name="x"),
        ShapeMismatchError,
        "Mismatched ALLTOALL tensor shapes for 'x': {others} passed [2] after the first dimension, {last} passed [3]",
    ),
    "dtype of an alltoall": Misuse(
        lambda hvd, odd: hvd.alltoall(torch.ones(hvd.size()).to(torch.int32 if odd else torch.int8), name="x"),
        MismatchError,
        "Mismatched ALLTOALL data types for 'x': {others} passed int8, {last} passed int32.",
    ),
    "shape of a reducescatter": Misuse(
        lambda hvd, odd: hvd.reducescatter(torch.ones(4 + odd, 2), name="x"),
        ShapeMismatchError,
        "Mismatched REDUCESCATTER tensor shapes for 'x': {others} passed [4, 2], {last} passed [5, 2].",
    ),
    "op of a reducescatter": Misuse(
        lambda hvd, odd: hvd.reducescatter(torch.ones(4), op=hvd.Sum if odd else hvd.Average, name="x"),
        MismatchError,
        "Mismatched REDUCESCATTER reduction operation for 'x': {others} passed Average, {last} passed Sum.",
    ),
    "factors of a reducescatter": Misuse(
        lambda hvd, odd: hvd.reducescatter(torch.ones(4), prescale_factor=1.0 + odd, name="x"),
        MismatchError,
        "factors for 'x': {others} passed (1.0, 1.0), {last} passed (2.0, 1.0).",
    ),
    "length of a group of gathers": Misuse(
        lambda hvd, odd: hvd.grouped_allgather([torch.ones(3)] * (2 + odd), name="x"),
        MismatchError,
        "Mismatched ALLGATHER group lengths for 'grouped_allgather.x': {others} passed 2 tensors, {last} passed 3",
    ),
    "length of a group of reductions": Misuse(
        lambda hvd, odd: hvd.grouped_reducescatter([torch.ones(3)] * (2 + odd), name="x"),
        MismatchError,
        "Mismatched REDUCESCATTER group lengths for 'grouped_reducescatter.x': {others} passed 2 tensors, {last}",
    ),
    "rows in a group of gathers": Misuse(
        lambda hvd, odd: hvd.grouped_allgather([torch.ones(3), torch.ones(3, 1 + odd)], name="x"),
        ShapeMismatchError,
        "{others} passed [[], [1]] after the first dimension, {last} passed [[], [2]] after the first dimension.",
    ),
    "dtype in a group of reductions": Misuse(
        lambda hvd, odd: hvd.grouped_reducescatter(
            [torch.ones(3), torch.ones(3).to(torch.int32 if odd else torch.int8)]
        ),
        MismatchError,
        "{others} passed float32, int8, {last} passed float32, int32.",
    ),
    "shape of a sparse tensor": Misuse(
        lambda hvd, odd: hvd.sparse_allreduce_async(torch.ones(4 + odd, 2).to_sparse(), name="x")(),
        ShapeMismatchError,
        "sparse tensor shapes for 'sparse_allreduce.x': {others} passed [4, 2], {last} passed [5, 2].",
    ),
}


@pytest.mark.parametrize("misuse", DIFFERING.values(), ids=DIFFERING)
@pytest.mark.mpi(min_size=2)
def test_every_rank_gets_the_error_and_can_go_on(hvd: ModuleType, misuse: Misuse) -> None:
    last = hvd.size() - 1
    others = "rank 0" if last == 1 else f"ranks {', '.join(map(str, range(last)))}"
    for _ in range(2):
        with pytest.raises(HorovodInternalError) as raised:
            misuse.call(hvd, hvd.rank() == last)
        assert type(raised.value) is misuse.error
        assert misuse.text.replace("{others}", others).replace("{last}", f"rank {last}") in str(raised.value)
        goes_on(hvd)
