"""What a ProcessSet may be made of, and what it says before it is registered."""

import pytest

from hvlike import ProcessSet


def test_ranks_are_sorted() -> None:
    assert ProcessSet([3, 0, 2]).ranks == [0, 2, 3]
    assert ProcessSet(range(2)).ranks == [0, 1]


def test_an_unregistered_set_knows_nothing() -> None:
    unregistered = ProcessSet([0, 1])
    assert unregistered.process_set_id is None
    assert unregistered.size() is None
    assert unregistered.rank() is None
    assert unregistered.included() is None
    assert str(unregistered) == "ProcessSet(process_set_id=None, ranks=[0, 1], mpi_comm=None)"


@pytest.mark.parametrize("what", ["01", 3, [0.5], None, [], [0, 0], [-1]], ids=repr)
def test_anything_else_is_refused(what: object) -> None:
    with pytest.raises(ValueError, match="ProcessSet should be initialized with a list of process ranks or an mpi4py"):
        ProcessSet(what)
