"""Fault tolerance without MPI: who has which number after a loss, and what MPI is told before it starts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvlike.errors import LaunchError
from hvlike.transport.failure.fault_tolerance import (
    EXCLUDED,
    assign_numbers,
    exclude_collectives,
    is_enabled,
)

ULFM = {"OMPI_MCA_mpi_ft_enable": "1"}


def assign(previous: list[int | None], size: int, without_state: tuple[int, ...] = ()) -> list[int | None]:
    """Numbers where all that had one have the state, but those at some places."""
    holds = [number is not None and place not in without_state for place, number in enumerate(previous)]
    return assign_numbers(previous, size, holds)


def test_a_spare_takes_the_number_of_the_lost_rank() -> None:
    assert assign([0, 1, 3, None, None], 4) == [0, 1, 3, 2, None]


def test_rank_0_is_one_that_has_trained() -> None:
    assert assign([1, 2, None], 3) == [0, 2, 1]


def test_a_spare_that_has_no_state_yet_gives_rank_0_to_one_that_has() -> None:
    assert assign([2, 0, None], 3, without_state=(1,)) == [0, 2, 1]


def test_without_spares_the_others_keep_their_numbers() -> None:
    assert assign([0, 2, 3], 4) == [0, 2, 3]
    assert assign([2, 3], 4) == [2, 3]
    assert assign([2, 3], 4, without_state=(0,)) == [3, 2]


def test_spares_alone_start_from_the_beginning() -> None:
    assert assign([None, None, None], 2) == [0, 1, None]


@given(st.integers(1, 6), st.integers(0, 4), st.data())
def test_numbers_are_given_once_and_as_many_as_can_be(size: int, spares: int, data: st.DataObject) -> None:
    everybody: list[int | None] = [*range(size), *[None] * spares]
    left = data.draw(st.lists(st.sampled_from(range(len(everybody))), unique=True, min_size=1).map(sorted))
    previous = [everybody[place] for place in left]
    holds = [number is not None and data.draw(st.booleans()) for number in previous]
    numbers = assign_numbers(previous, size, holds)
    given_out = [each for each in numbers if each is not None]
    assert len(set(given_out)) == len(given_out) == min(size, len(left))
    if any(holds):
        assert holds[numbers.index(min(given_out))]
    moved = [place for place, number in enumerate(previous) if number is not None and numbers[place] != number]
    assert len(moved) <= 2, "only the one that becomes rank 0, and the one that was"


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
