"""The levels of recursive reductions: what each rank sends, receives and adds. Without MPI, on sets and strings."""

import pytest

from hvlike.backends.network.cost_model import Way, members
from hvlike.backends.network.partition import fold
from hvlike.backends.network.recursive_reduction import Step, partner_of, steps_of

WAYS = {
    2: [(2,)],
    3: [(3,)],
    4: [(2, 2), (4,)],
    6: [(2, 3), (6,)],
    12: [(2, 2, 3), (4, 3), (2, 6), (12,)],
    30: [(2, 3, 5), (6, 5)],
    37: [(2, 2, 3, 3), (4, 9)],
    41: [(2, 2, 2, 5)],
}
CASES = [(size, Way(sharded, levels)) for size, found in WAYS.items() for levels in found for sharded in (False, True)]


def test_six_ranks_by_two_and_three() -> None:
    whole, shards = Way(False, (2, 3)), Way(True, (2, 3))
    assert steps_of(0, 6, 12, whole) == [Step([0, 1], [(0, 12)] * 2, 0), Step([0, 2, 4], [(0, 12)] * 3, 0)]
    assert steps_of(3, 6, 12, shards) == [
        Step([2, 3], [(0, 6), (6, 12)], 1),
        Step([1, 3, 5], [(6, 8), (8, 10), (10, 12)], 1),
    ]


def test_with_one_rank_too_many_the_first_gives_what_it_has_to_the_second() -> None:
    assert members(37) == 36
    assert [partner_of(rank, 37) for rank in range(4)] == [1, 0, None, None]
    assert steps_of(1, 37, 8, Way(False, (4, 9)))[0].group == [1, 2, 3, 4]


@pytest.mark.parametrize(("size", "way"), CASES)
def test_every_rank_ends_with_the_sum_of_all(size: int, way: Way) -> None:
    elements = 41
    sums = simulate(size, elements, way)
    taking = [rank for rank in range(size) if partner_of(rank, size) is None or rank % 2]
    assert len(taking) == members(size)
    if way.sharded:
        parts = sorted(each for rank in taking for each in sums[rank])
        assert parts == list(range(elements))
    else:
        assert all(sorted(sums[rank]) == list(range(elements)) for rank in taking)
    texts = {text for rank in taking for text in sums[rank].values()}
    assert len(texts) == 1, "an element is added in another order on another rank"


@pytest.mark.parametrize("size", WAYS)
def test_the_order_of_a_sum_does_not_depend_on_the_way(size: int) -> None:
    found = {next(iter(simulate(size, 3 * size, way)[1].values())) for each, way in CASES if each == size}
    assert len(found) == 1


def test_the_order_of_twelve_contributions() -> None:
    assert order(list("0123")) == "((0+1)+(2+3))"
    assert order(list("012")) == "((0+1)+2)"
    assert order([chr(ord("a") + each) for each in range(12)]) == "((((a+b)+(c+d))+((e+f)+(g+h)))+((i+j)+(k+l)))"


def order(texts: list[str]) -> str:
    pieces = [[text] for text in texts]
    fold(pieces, add)
    return pieces[0][0]


def add(target: list[str], other: list[str]) -> None:
    target[0] = f"({target[0]}+{other[0]})"


def simulate(size: int, elements: int, way: Way) -> list[dict[int, str]]:
    """What each rank holds after the levels: the sum of each of its elements, spelled out."""
    held = [{each: str(rank) for each in range(elements)} for rank in range(size)]
    for rank in range(1, size, 2):
        if partner_of(rank, size) is not None:
            held[rank] = dict.fromkeys(range(elements), f"({rank - 1}+{rank})")
    schedules = {
        rank: steps_of(rank, size, elements, way) for rank in range(size) if partner_of(rank, size) is None or rank % 2
    }
    for number in range(len(way.levels)):
        before = held
        held = list(before)
        for rank, steps in schedules.items():
            step = steps[number]
            assert step.group[step.position] == rank
            # All see the same group and the same parts.
            assert all(schedules[peer][number][:2] == step[:2] for peer in step.group)
            mine = range(*step.parts[step.position])
            held[rank] = {each: order([before[peer][each] for peer in step.group]) for each in mine}
    return held
