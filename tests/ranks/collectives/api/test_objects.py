"""Python objects between ranks, and work between two collectives: errors are raised on all ranks, and none waits."""

import sys
import threading
from collections import OrderedDict
from types import ModuleType
from typing import Any

import pytest
import torch

from hvlike import allgather_object, broadcast_object
from hvlike.collectives.api.outcome import settle
from hvlike.errors import HorovodInternalError, StateError, UsageError

pytestmark = pytest.mark.rests_on_mpi

OBJECTS: list[Any] = [
    None,
    0,
    "text",
    b"",
    [1, {"a": (2.5, None)}],
    OrderedDict(b=1, a=2),
    torch.arange(5),
    {"weights": torch.ones(2, 3, dtype=torch.bfloat16)},
    "long" * 300_000,
]


def same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    return bool(first == second) and type(first) is type(second)


@pytest.mark.parametrize("number", range(len(OBJECTS)))
def test_broadcast_from_every_root(hvd: ModuleType, number: int) -> None:
    for root in range(hvd.size()):
        # The ranks may pass different types: names must not depend on them.
        mine = OBJECTS[number] if hvd.rank() == root else [hvd.rank(), {}][hvd.rank() % 2]
        got = broadcast_object(mine, root)
        assert same(got, OBJECTS[number])
        assert got is mine or hvd.rank() != root


def test_broadcast_with_a_name_and_without_an_object(hvd: ModuleType) -> None:
    assert broadcast_object({"epoch": 3} if hvd.rank() == 0 else None, 0, name="resume") == {"epoch": 3}
    if hvd.rank() == 0:
        assert broadcast_object("only the root has one", 0) == "only the root has one"
    else:
        assert broadcast_object(root_rank=0) == "only the root has one"


def test_allgather_keeps_the_order_of_ranks(hvd: ModuleType) -> None:
    for number in range(len(OBJECTS)):
        mine = [hvd.rank(), OBJECTS[(number + hvd.rank()) % len(OBJECTS)]]
        everybody = allgather_object(mine)
        assert [each[0] for each in everybody] == list(range(hvd.size()))
        for rank, (_, got) in enumerate(everybody):
            assert same(got, OBJECTS[(number + rank) % len(OBJECTS)])


def test_allgather_gives_copies(hvd: ModuleType) -> None:
    mine = [1]
    everybody = allgather_object(mine, name="lists")
    everybody[hvd.rank()].append(2)
    assert mine == [1]


def test_an_object_that_does_not_pickle_is_an_error_on_every_rank_and_the_job_goes_on(hvd: ModuleType) -> None:
    root = hvd.size() - 1
    expected = UsageError if hvd.rank() == root else HorovodInternalError
    with pytest.raises(expected, match=rf"broadcast_object: the object of rank {root} cannot be pickled \(lock"):
        broadcast_object(threading.Lock() if hvd.rank() == root else None, root)
    with pytest.raises(expected, match=rf"allgather_object: the object of rank {root} cannot be pickled \(lock"):
        allgather_object(threading.Lock() if hvd.rank() == root else 1)
    assert allgather_object(hvd.rank()) == list(range(hvd.size()))


def test_functions_travel_where_cloudpickle_is_installed(hvd: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cloudpickle")
    assert broadcast_object(lambda: 7, 0)() == 7
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises((UsageError, HorovodInternalError), match="or install cloudpickle"):
        broadcast_object(lambda: 7, 0)


def test_functions_without_cloudpickle_are_refused_with_advice(
    hvd: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises((UsageError, HorovodInternalError), match=r"define its class or function at module level"):
        broadcast_object(lambda: 7, 0)


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def works(hvd: ModuleType) -> None:
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="after") == hvd.size()


def test_nothing_fails(hvd: ModuleType) -> None:
    assert settle("this", lambda: hvd.rank()) == hvd.rank()


@pytest.mark.parametrize("failing", [{0}, {1}, {0, 1}, {2}])
def test_some_fail(hvd: ModuleType, failing: set[int]) -> None:
    failing = failing & set(range(hvd.size()))
    if not failing:
        return

    def work() -> int:
        if hvd.rank() in failing:
            raise KeyError("gone")
        return 1

    expected = UsageError if hvd.rank() in failing else HorovodInternalError
    with pytest.raises(expected) as info:
        settle("this call", work)
    for number in failing:
        assert f"rank {number}: KeyError: 'gone'" in str(info.value)
    assert str(info.value).startswith("this call: ")
    assert isinstance(info.value.__cause__, KeyError) == (hvd.rank() in failing)
    works(hvd)


def test_an_error_of_hvlike_stays_what_it_is(hvd: ModuleType) -> None:
    def work() -> None:
        if hvd.rank() == 0:
            raise StateError("not now")

    with pytest.raises(StateError if hvd.rank() == 0 else HorovodInternalError, match="not now"):
        settle("this", work)
    works(hvd)


def test_an_error_without_a_text(hvd: ModuleType) -> None:
    def work() -> None:
        if hvd.rank() == 0:
            raise Silent

    with pytest.raises(UsageError if hvd.rank() == 0 else HorovodInternalError, match="rank 0: Silent"):
        settle("this", work)
    works(hvd)


class Unpicklable:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> str:
        raise self.error


@pytest.mark.parametrize("error", [Silent(), ValueError("half a letter: \ud800"), RecursionError()])
def test_objects_whose_errors_cannot_be_read(hvd: ModuleType, error: Exception) -> None:
    expected = UsageError if hvd.rank() == 0 else HorovodInternalError
    with pytest.raises(expected, match=type(error).__name__):
        hvd.broadcast_object(Unpicklable(error), 0)
    with pytest.raises(expected, match="rank 0"):
        hvd.allgather_object(Unpicklable(error) if hvd.rank() == 0 else 1)
    works(hvd)
