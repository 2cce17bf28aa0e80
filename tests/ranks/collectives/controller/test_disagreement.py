"""Ranks that ask for different things under one name: the same error on every rank, and the job goes on."""

import time
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

from hvlike import allgather
from hvlike.errors import DeadlockError, HorovodInternalError, MismatchError, ShapeMismatchError, UsageError

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.differs_by_ranks(2), pytest.mark.rests_on_mpi]


class Misuse(NamedTuple):
    call: Callable[[ModuleType, bool], Any]
    """call(hvd, odd): odd on the last rank only, which differs from the others."""
    error: type[HorovodInternalError]
    text: str
    """With {others} and {last} for the ranks."""


MISUSES = {
    "shape": Misuse(
        lambda hvd, odd: hvd.allreduce(torch.ones(4 if odd else 3), name="grad"),
        ShapeMismatchError,
        "Mismatched ALLREDUCE tensor shapes for 'grad': {others} passed [3], {last} passed [4].",
    ),
    "shape of a large tensor": Misuse(
        lambda hvd, odd: hvd.allreduce_(torch.ones(300_000 + odd), name="grad"),
        ShapeMismatchError,
        "{others} passed [300000], {last} passed [300001].",
    ),
    "dtype": Misuse(
        lambda hvd, odd: hvd.allreduce(torch.ones(3, dtype=torch.float64 if odd else torch.float32), name="grad"),
        MismatchError,
        "Mismatched ALLREDUCE data types for 'grad': {others} passed float32, {last} passed float64.",
    ),
    "op": Misuse(
        lambda hvd, odd: hvd.allreduce(torch.ones(3), op=hvd.Max if odd else hvd.Sum, name="grad"),
        MismatchError,
        "Mismatched ALLREDUCE reduction operation for 'grad': {others} passed Sum, {last} passed Max.",
    ),
    "factor before": Misuse(
        lambda hvd, odd: hvd.allreduce(torch.ones(3), prescale_factor=1 + odd, name="grad"),
        MismatchError,
        "Mismatched ALLREDUCE prescale and/or postscale factors for 'grad': {others} passed (1.0, 1.0), {last} passed",
    ),
    "length of a group": Misuse(
        lambda hvd, odd: hvd.grouped_allreduce([torch.ones(3)] * (2 + odd), name="layer"),
        MismatchError,
        "Mismatched ALLREDUCE group lengths for 'grouped_allreduce.layer': {others} passed 2 tensors, {last} passed 3",
    ),
    "dtype in a group": Misuse(
        lambda hvd, odd: hvd.grouped_allreduce([torch.ones(3), torch.ones(3).to(torch.int32 if odd else torch.int64)]),
        MismatchError,
        "{others} passed float32, int64, {last} passed float32, int32.",
    ),
    "shape in a group": Misuse(
        lambda hvd, odd: hvd.grouped_allreduce([torch.ones(3), torch.ones(4 + odd)]),
        ShapeMismatchError,
        "{others} passed [[3], [4]], {last} passed [[3], [5]].",
    ),
    "root": Misuse(
        lambda hvd, odd: hvd.broadcast(torch.ones(3), root_rank=1 if odd else 0, name="weights"),
        MismatchError,
        "Mismatched BROADCAST root ranks for 'weights': {others} passed root 0, {last} passed root 1.",
    ),
    "shape of a broadcast": Misuse(
        lambda hvd, odd: hvd.broadcast_(torch.ones(3 + odd), root_rank=0, name="weights"),
        ShapeMismatchError,
        "Mismatched BROADCAST tensor shapes for 'weights': {others} passed [3], {last} passed [4].",
    ),
    "trailing dimension of an allgather": Misuse(
        lambda hvd, odd: allgather(torch.ones(2, 3 + odd), name="rows"),
        ShapeMismatchError,
        "Mismatched ALLGATHER tensor shapes for 'rows': {others} passed [3] after the first dimension, {last} passed",
    ),
    "number of dimensions of an allgather": Misuse(
        lambda hvd, odd: allgather(torch.ones(2) if odd else torch.ones(2, 1), name="rows"),
        ShapeMismatchError,
        "{others} passed [1] after the first dimension, {last} passed [] after the first dimension.",
    ),
    "rows of an alltoall": Misuse(
        lambda hvd, odd: hvd.alltoall(torch.ones(hvd.size(), 2 + odd), name="x"),
        ShapeMismatchError,
        "Mismatched ALLTOALL tensor shapes for 'x': {others} passed [2] after the first dimension, {last} passed [3]",
    ),
    "shape of a reducescatter": Misuse(
        lambda hvd, odd: hvd.reducescatter(torch.ones(4 + odd, 2), name="x"),
        ShapeMismatchError,
        "Mismatched REDUCESCATTER tensor shapes for 'x': {others} passed [4, 2], {last} passed [5, 2].",
    ),
    "rows in a group of gathers": Misuse(
        lambda hvd, odd: hvd.grouped_allgather([torch.ones(3), torch.ones(3, 1 + odd)], name="x"),
        ShapeMismatchError,
        "{others} passed [[], [1]] after the first dimension, {last} passed [[], [2]] after the first dimension.",
    ),
    "shape of a sparse tensor": Misuse(
        lambda hvd, odd: hvd.sparse_allreduce_async(torch.ones(4 + odd, 2).to_sparse(), name="x")(),
        ShapeMismatchError,
        "sparse tensor shapes for 'sparse_allreduce.x': {others} passed [4, 2], {last} passed [5, 2].",
    ),
}


def named(hvd: ModuleType, text: str) -> str:
    """The text with the ranks of this job in it."""
    last = hvd.size() - 1
    others = "rank 0" if last == 1 else f"ranks {', '.join(map(str, range(last)))}"
    return text.replace("{others}", others).replace("{last}", f"rank {last}")


def goes_on(hvd: ModuleType) -> None:
    """Unnamed operations of every kind still meet."""
    mine = torch.tensor([hvd.rank(), 1.0])
    assert hvd.allreduce(mine, op=hvd.Sum).tolist() == [sum(range(hvd.size())), hvd.size()]
    assert hvd.broadcast(mine, root_rank=1).tolist() == [1.0, 1.0]
    assert hvd.grouped_allreduce([mine], op=hvd.Max)[0].tolist() == [hvd.size() - 1, 1.0]
    assert hvd.allgather(torch.tensor([hvd.rank()])).tolist() == list(range(hvd.size()))
    assert hvd.alltoall(torch.full((hvd.size(),), hvd.rank())).tolist() == list(range(hvd.size()))
    assert hvd.reducescatter(torch.ones(hvd.size()), op=hvd.Sum).tolist() == [hvd.size()]
    assert hvd.grouped_allgather([torch.tensor(1)])[0].tolist() == [1] * hvd.size()
    assert hvd.grouped_reducescatter([torch.ones(hvd.size())], op=hvd.Sum)[0].tolist() == [hvd.size()]
    hvd.barrier()


@pytest.mark.parametrize("misuse", MISUSES.values(), ids=MISUSES)
def test_every_rank_gets_the_error_and_can_go_on(hvd: ModuleType, misuse: Misuse) -> None:
    for _ in range(2):
        with pytest.raises(HorovodInternalError) as raised:
            misuse.call(hvd, hvd.rank() == hvd.size() - 1)
        assert type(raised.value) is misuse.error
        assert named(hvd, misuse.text) in str(raised.value)
        goes_on(hvd)


def test_an_asynchronous_error_waits_for_synchronize(hvd: ModuleType) -> None:
    good = hvd.allreduce_async(torch.ones(2), name="good", op=hvd.Sum)
    bad = hvd.allreduce_async(torch.ones(2 + hvd.rank()), name="bad", op=hvd.Sum)
    with pytest.raises(ShapeMismatchError):
        hvd.synchronize(bad)
    assert hvd.synchronize(good).tolist() == [hvd.size()] * 2
    bad = hvd.allreduce_async(torch.ones(2 + hvd.rank()), name="bad", op=hvd.Sum)
    while not hvd.poll(bad):
        pass
    for wait in (bad.wait, bad.result, bad.result):
        with pytest.raises(ShapeMismatchError):
            wait()
    goes_on(hvd)


def test_the_input_is_untouched_after_an_error(hvd: ModuleType) -> None:
    mine = torch.full((3 + hvd.rank(),), 5.0)
    with pytest.raises(ShapeMismatchError):
        hvd.allreduce_(mine, op=hvd.Sum)
    assert set(mine.tolist()) == {5.0}


def test_every_differing_rank_is_named(hvd: ModuleType) -> None:
    with pytest.raises(ShapeMismatchError) as raised:
        hvd.allreduce(torch.ones(hvd.rank() + 1), name="grad")
    for rank in range(hvd.size()):
        assert f"rank {rank} passed [{rank + 1}]" in str(raised.value)


DEADLOCKS: dict[str, tuple[Callable[[ModuleType], Any], Callable[[ModuleType], Any], str, str]] = {
    "other kinds under one name": (
        lambda hvd: hvd.allreduce(torch.ones(2), name="x"),
        lambda hvd: allgather(torch.ones(2), name="x"),
        "waits in allreduce 'x'",
        "waits in allgather 'x'",
    ),
    "other names": (
        lambda hvd: hvd.allreduce(torch.ones(2), name="loss"),
        lambda hvd: hvd.allreduce(torch.ones(2), name="accuracy"),
        "waits in allreduce 'loss'",
        "waits in allreduce 'accuracy'",
    ),
    "unnamed operations of other kinds": (
        lambda hvd: hvd.barrier(),
        lambda hvd: hvd.broadcast(torch.ones(2), root_rank=0),
        "waits in barrier 'noname.",
        "waits in broadcast 'noname.",
    ),
}


@pytest.mark.parametrize("case", DEADLOCKS.values(), ids=DEADLOCKS)
def test_a_deadlock_is_an_error_on_every_rank(
    hvd: ModuleType, case: tuple[Callable[[ModuleType], Any], Callable[[ModuleType], Any], str, str]
) -> None:
    most, last, said_by_most, said_by_last = case
    with pytest.raises(DeadlockError) as raised:
        (last if hvd.rank() == hvd.size() - 1 else most)(hvd)
    assert f"rank 0 {said_by_most}" in str(raised.value)
    assert f"rank {hvd.size() - 1} {said_by_last}" in str(raised.value)
    goes_on(hvd)


def test_after_a_local_error_the_others_are_told_and_all_count_alike(hvd: ModuleType) -> None:
    if hvd.rank() == 0:
        with pytest.raises(UsageError):
            hvd.allreduce(torch.ones(2), op=99)
    # The refused call has used up its number on rank 0, so that this one does not meet the others' first.
    with pytest.raises(DeadlockError):
        hvd.allreduce(torch.ones(2), op=hvd.Sum)
    goes_on(hvd)


def test_a_rank_that_is_late_is_no_deadlock(hvd: ModuleType) -> None:
    first = hvd.allreduce_async(torch.ones(2), name="first", op=hvd.Sum)
    if hvd.rank() == 0:
        hvd.synchronize(first)
        # Longer than the patience after which the ranks tell what they wait for.
        time.sleep(1.2)
    hvd.allreduce(torch.ones(2), name="second", op=hvd.Sum)
    if hvd.rank() > 0:
        hvd.synchronize(first)
    goes_on(hvd)
