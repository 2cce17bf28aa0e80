"""Fault tolerance without MPI: whether it is on, and what MPI is told before it starts."""

import pytest

from hvlike.errors import LaunchError
from hvlike.transport.failure.fault_tolerance import (
    EXCLUDED,
    exclude_collectives,
    is_enabled,
)

ULFM = {"OMPI_MCA_mpi_ft_enable": "1"}


def test_it_is_on_where_mpirun_says_so() -> None:
    assert is_enabled(ULFM)
    assert not is_enabled({})
    assert not is_enabled({"OMPI_MCA_mpi_ft_enable": "0"})


def test_modules_that_return_wrong_sums_are_excluded_before_mpi_starts() -> None:
    environ = dict(ULFM)
    exclude_collectives(environ, initialised=False)
    assert environ["OMPI_MCA_coll"] == EXCLUDED
    without: dict[str, str] = {}
    exclude_collectives(without, initialised=False)
    assert without == {}


@pytest.mark.parametrize("chosen", ["^han", "^cuda,han", "basic,libnbc"])
def test_a_choice_without_them_stays(chosen: str) -> None:
    environ = {**ULFM, "OMPI_MCA_coll": chosen}
    exclude_collectives(environ, initialised=True)
    assert environ["OMPI_MCA_coll"] == chosen


@pytest.mark.parametrize("chosen", [None, "han,basic,libnbc", "^cuda"])
def test_where_they_may_be_in_use_it_says_what_to_add(chosen: str | None) -> None:
    environ = ULFM if chosen is None else {**ULFM, "OMPI_MCA_coll": chosen}
    with pytest.raises(LaunchError, match=r"mpirun --with-ft ulfm --mca coll \^han"):
        exclude_collectives(environ, initialised=True)
