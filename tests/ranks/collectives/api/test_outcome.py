"""Work between two collectives: it ends well on all ranks, or all raise an error that names ranks and causes."""

from types import ModuleType

import pytest
import torch

from hvlike.collectives.api.outcome import settle
from hvlike.errors import HorovodInternalError, StateError, UsageError


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
