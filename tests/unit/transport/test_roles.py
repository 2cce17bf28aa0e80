"""Who has which number after a loss, and what became of the numbers of before."""

from hypothesis import given
from hypothesis import strategies as st

from hvlike.transport.failure.roles import Roles, assign_numbers


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


def test_the_last_processes_are_spares_at_the_start() -> None:
    roles = [Roles.at_start(position, 4, 1) for position in range(4)]
    assert [each.number for each in roles] == [0, 1, 2, None]
    assert {(each.size, each.spares) for each in roles} == {(3, (3,))}


def test_without_a_spare_the_numbers_close_up() -> None:
    told = [(0, 4, True), (3, 4, True)]
    roles = [Roles.at_start(number, 4, 0).after_loss(position, told) for position, (number, *_) in enumerate(told)]
    assert [(each.number, each.size, each.spares) for each in roles] == [(0, 2, ()), (1, 2, ())]
    assert roles[0].renumbered == roles[1].renumbered == {0: 0, 3: 1}


def test_after_several_losses_the_first_numbers_lead_to_those_of_now_until_they_are_settled() -> None:
    roles = Roles.at_start(3, 4, 0)
    for told in ([(0, 4, True), (2, 4, True), (3, 4, True)], [(1, 3, True), (2, 3, True)]):
        roles = roles.after_loss(len(told) - 1, told)
    assert (roles.number, roles.size) == (1, 2)
    assert roles.renumbered == {2: 0, 3: 1}
    assert roles.settled().renumbered == {0: 0, 1: 1}


def test_who_has_not_trained_knows_the_size_from_the_others() -> None:
    told = [(0, 3, True), (None, 1, False), (None, 3, False)]
    roles = [Roles.at_start(place, 5, 2).after_loss(place, told) for place in range(3)]
    assert [each.number for each in roles] == [0, 1, 2]
    assert {each.size for each in roles} == {3}
