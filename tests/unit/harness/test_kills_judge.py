"""The judge of support.kills finds what is wrong: each wrong output is one line away from a right one."""

from collections.abc import Sequence

import pytest
from support.kills.judge import own_states_of, read_lines, what_is_wrong, what_is_wrong_with_own_states

REFERENCE = {0: "a", 1: "b", 2: "c"}
SPARE_TOOK_OVER = """\
0 BEGIN 0 2 0 0 a
1 BEGIN 1 2 0 0 a
0 COMMIT 1 2 b
0 BEGIN 0 2 1 3 b
2 BEGIN 1 2 1 3 b
0 COMMIT 2 2 c
0 RESULT 0 2 c t,u t
2 RESULT 1 2 c t,u t
0 AGAIN 0 2 c t,u t
2 AGAIN 1 2 c t,u t
"""


def judge(output: str) -> list[str]:
    """What is wrong when place 1 of two ranks and a spare was killed."""
    return what_is_wrong(read_lines(output), 2, 1, [1], REFERENCE)


def test_a_spare_that_took_over_is_right() -> None:
    assert judge(SPARE_TOOK_OVER) == []


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("2 BEGIN 1 2 1 3 b", "2 BEGIN 1 2 1 3 x", "wrong commit 1"),
        ("2 RESULT 1 2 c", "2 RESULT 1 2 x", "the results differ"),
        ("2 AGAIN 1 2 c", "2 AGAIN 1 2 x", "fresh run"),
        ("2 AGAIN 1 2 c t,u", "2 AGAIN 1 2 c t,x", "fresh run"),
        ("2 RESULT 1 2 c t,u t\n", "", "only places"),
        ("2 AGAIN 1 2 c t,u t\n", "", "have not ended"),
    ],
)
def test_one_wrong_line_is_found(right: str, wrong: str, said: str) -> None:
    found = judge(SPARE_TOOK_OVER.replace(right, wrong))
    assert any(said in each for each in found), found


def test_who_is_killed_after_all_agreed_on_the_end_is_not_missed() -> None:
    ended = "".join(
        line for line in SPARE_TOOK_OVER.splitlines(keepends=True) if line[0] != "2" and "AGAIN" not in line
    )
    assert judge(ended.replace("0 BEGIN 0 2 1 3 b\n", "")) == []
    # In the last attempt another one had taken its number over.
    assert judge(ended) != []


def test_numbers_that_a_fresh_run_rounds_otherwise_are_right() -> None:
    assert judge(SPARE_TOOK_OVER.replace("2 AGAIN 1 2 c t,u t", "2 AGAIN 1 2 c t,u v")) == []


def test_another_result_than_without_failures_is_found() -> None:
    other = SPARE_TOOK_OVER.replace(" 2 c", " 2 x")
    assert "the result is not that of the run without failures" in judge(other)


UNDISTURBED = """\
0 BEGIN 0 2 0 0 a x 0,0,0,0
0 COMMIT 1 2 b y,z 4,1,-2,3
0 COMMIT 2 2 c v,w 5,1,-2,3
"""


def judge_own(begin: str, more: str = "", *, from_disk: bool = False, lost: Sequence[int] = ()) -> list[str]:
    """What is wrong when two ranks began, and then some again, from the first commit; more: lines that follow."""
    reference = own_states_of(read_lines(UNDISTURBED))
    lines = read_lines(f"0 BEGIN 0 2 0 0 a x 0,0,0,0\n0 BEGIN {begin}\n{more}")
    return what_is_wrong_with_own_states(lines, 2, reference, from_disk=from_disk, lost=lost)


def test_states_of_the_ranks_come_back_bit_for_bit_to_as_many_and_in_sum_to_fewer() -> None:
    assert judge_own("0 2 1 3 b y,z 4,1,-2,3") == []
    assert judge_own("0 1 1 3 b y 3.5,1.000001,-2,3") == []
    assert judge_own("0 1 1 3 b y 0,0,0,0", from_disk=True) == []


@pytest.mark.parametrize(
    "begin", ["0 2 1 3 b y,y 4,1,-2,3", "0 1 1 3 b y 4,1,-2,3.1", "0 1 1 3 b y 5,1,-2,3", "0 1 1 3 b y 0,0,0,0"]
)
def test_states_of_the_ranks_that_are_wrong_are_found(begin: str) -> None:
    assert judge_own(begin)


def test_a_training_without_such_states_is_right() -> None:
    lines = read_lines("0 BEGIN 0 2 0 0 a - -\n0 COMMIT 1 2 b - -\n0 BEGIN 0 1 1 3 b - -")
    assert what_is_wrong_with_own_states(lines, 2, own_states_of(lines), from_disk=True) == []


def test_a_later_commit_has_the_states_of_the_ranks_too() -> None:
    assert judge_own("0 2 1 3 b y,z 4,1,-2,3", "0 COMMIT 2 2 c v,w 5,1,-2,3") == []
    assert judge_own("0 2 1 3 b y,z 4,1,-2,3", "0 COMMIT 2 2 c v,v 5,1,-2,3")
    # With fewer ranks the training is another one.
    assert judge_own("0 1 1 3 b y 4,1,-2,3", "0 COMMIT 2 1 c s 5,1,-2,3") == []
    assert judge_own("0 1 1 3 b y 4,1,-2,3", "0 BEGIN 0 2 1 3 b y,z -\n0 COMMIT 2 2 c s,s 5,1,-2,3") == []


def test_from_a_commit_on_that_was_lost_in_part_the_training_is_another_one() -> None:
    assert judge_own("0 2 1 3 b z,z z", "0 COMMIT 2 2 c s,t s\n0 RESULT 0 2 c s,t s", lost=[1]) == []
    assert judge_own("0 2 1 3 b s,s s", lost=[0]) == []
    assert judge_own("0 2 1 3 b z,z z", lost=[2])
    assert judge_own("0 2 1 3 b y,z y", "0 COMMIT 2 2 c s,t s", lost=[3])


def test_from_a_commit_that_was_lost_in_part_all_go_on_with_the_states_of_one() -> None:
    result = "0 RESULT 0 2 c s,t s"
    assert judge_own("0 2 1 3 b y,z y", result, lost=[1])
    assert judge_own("0 2 1 3 b s,s s", result, lost=[1])
    # After another such commit, and with fewer ranks, the reference has nothing to say.
    assert judge_own("0 2 1 3 b s,s s", result, lost=[0, 1]) == []
    assert judge_own("0 2 1 3 b s,t s", result, lost=[0, 1])
    assert judge_own("0 1 1 3 b y 4,1,-2,3", "0 BEGIN 0 1 2 6 c s s\n0 RESULT 0 1 c t t", lost=[2]) == []
    # Whoever began before the loss had its own.
    assert judge_own("0 2 1 3 b y,z y", lost=[1]) == []
    assert judge_own("0 2 1 3 b y,z y", f"0 BEGIN 0 2 1 3 b y,y y\n{result}", lost=[1]) == []
