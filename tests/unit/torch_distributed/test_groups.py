"""Members of a group: where they meet, what a store answers, which receive gets which message, what errors say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvlike.errors import LaunchError, UsageError
from hvlike.torch_distributed.autoload import OLDEST_TORCH
from hvlike.torch_distributed.directory import Answer as MemberAnswer
from hvlike.torch_distributed.directory import describe_calls, describe_missing
from hvlike.torch_distributed.endpoint import Transfer
from hvlike.torch_distributed.key_value_table import Answer, Table
from hvlike.torch_distributed.point_to_point import Matching
from hvlike.torch_distributed.store import check_environment, check_place, set_variables
from hvlike.torch_distributed.tensor_bytes import bytes_to_send

FIRST, SECOND = (0, 1), (1, 1)


def test_who_waits_for_a_key_is_answered_after_the_call_that_sets_it() -> None:
    table = Table()
    assert table.call(FIRST, "get", "key") == []
    assert table.call(SECOND, "add", "key", 3) == [(SECOND, Answer(True, 3)), (FIRST, Answer(True, b"3"))]


def test_a_wait_for_several_keys_ends_with_the_last_one() -> None:
    table = Table()
    assert table.call(FIRST, "wait", ["one", "two"]) == []
    assert table.call(SECOND, "set", "one", b"") == [(SECOND, Answer(True, None))]
    assert table.cancel(SECOND) == []
    due = table.call(SECOND, "multi_set", ["two", "three"], [b"", b""])
    assert due == [(SECOND, Answer(True, None)), (FIRST, Answer(True, None))]


def test_one_value_of_a_queue_serves_one_caller() -> None:
    table = Table()
    assert table.call(FIRST, "queue_pop", "queue", True) == table.call(SECOND, "queue_pop", "queue", True) == []
    assert table.call((2, 1), "queue_push", "queue", b"a")[1:] == [(FIRST, Answer(True, b"a"))]
    assert table.call((2, 2), "queue_push", "queue", b"b")[1:] == [(SECOND, Answer(True, b"b"))]
    assert table.call((2, 3), "queue_pop", "queue", False) == [((2, 3), Answer(True, None))]
    assert table.call((2, 4), "check", ["queue"]) == [((2, 4), Answer(True, False))]


def test_a_call_that_is_cancelled_is_never_answered() -> None:
    table = Table()
    table.call(FIRST, "wait", ["there", "never"])
    table.call(SECOND, "set", "there", b"")
    assert table.cancel(FIRST) == ["never"]
    assert table.call(SECOND, "set", "never", b"") == [(SECOND, Answer(True, None))]


def test_nobody_waits_once_somebody_has_left() -> None:
    table = Table()
    table.call(FIRST, "get", "never")
    lost = Answer(False, "rank 2 has left and nobody has set never")
    assert table.lose("rank 2 has left") == [(FIRST, lost)]
    assert table.call(SECOND, "get", "never") == [(SECOND, lost)]
    table.call(SECOND, "set", "never", b"now")
    assert table.call(SECOND, "get", "never") == [(SECOND, Answer(True, b"now"))]


def world(rank: int, size: int) -> Any:
    nodes = (tuple(range(size)),)
    found = SimpleNamespace(rank=rank, size=size, local_rank=rank, local_size=size, nodes=nodes)
    found.place = found
    return found


def test_what_is_left_out_or_right_is_accepted() -> None:
    check_place(None, None, world(1, 4))
    check_place(1, 4, world(1, 4))
    check_environment({}, 1, 4)
    check_environment({"RANK": "1", "WORLD_SIZE": "4"}, 1, 4)


def test_another_place_is_refused() -> None:
    with pytest.raises(UsageError, match=r"rank=2, but this is MPI's rank 1 and world_size=8, but MPI has started 4"):
        check_place(2, 8, world(1, 4))


def test_a_process_that_no_mpirun_has_started_is_told_to_use_it() -> None:
    with pytest.raises(LaunchError, match=r"world_size=4, but MPI has started one process.*mpirun -n 4 python"):
        check_place(1, 4, world(0, 1))
    with pytest.raises(LaunchError, match=r"WORLD_SIZE=4, but MPI has started one process.*mpirun -n 4 python"):
        check_environment({"RANK": "1", "WORLD_SIZE": "4"}, 0, 1)


def test_variables_that_say_otherwise_are_refused() -> None:
    with pytest.raises(LaunchError, match=r"RANK=0, but this is MPI's rank 1 of 4"):
        check_environment({"RANK": "0", "WORLD_SIZE": "4"}, 1, 4)


def test_the_variables_of_the_launcher_may_be_those_of_a_larger_job() -> None:
    """hvlike.init(comm=[2, 3]) in a job of four ranks."""
    environment = {"RANK": "3", "WORLD_SIZE": "4", "PMI_RANK": "3", "PMI_SIZE": "4"}
    check_environment(environment, 1, 2)
    set_variables(environment, world(1, 2))
    assert (environment["RANK"], environment["WORLD_SIZE"], environment["GROUP_RANK"]) == ("1", "2", "0")


OLD = tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH

needs_groups = pytest.mark.skipif(OLD, reason="this torch is too old for the backend")


@needs_groups
def test_members_that_know_different_numbers_of_groups_meet() -> None:
    from hvlike.torch_distributed.groups import GroupNames

    one, other = GroupNames(), GroupNames()
    one.unique("a" * 40, [0, 2], default=False)
    first = one.unique("b" * 40, [0, 1], default=False)
    assert other.unique("c" * 40, [0, 1], default=False) == first
    assert one.unique("d" * 40, [0, 1], default=False) != first


@needs_groups
def test_a_name_of_torch_that_comes_again_after_a_destroy_is_another_one() -> None:
    from hvlike.torch_distributed.groups import GroupNames

    names = GroupNames()
    assert names.unique("0", [0, 1], default=True) != names.unique("0", [0, 1], default=True)


def test_receives_of_a_lost_rank_are_taken_out() -> None:
    matching: Matching[str, str] = Matching()
    for source, name in ((1, "a"), (2, "b"), (None, "c")):
        matching.receive(source, 7, name)
    assert matching.take_receives(lambda source, _: source in (None, 1)) == ["a", "c"]
    assert matching.arrive(1, 7, "late") is None
    assert matching.arrive(2, 7, "x") == "b"
    assert matching.take_messages() == [(1, "late")]
    assert matching.receive(1, 7, "d") is None


Waiting = tuple[int | None, int, int]
"""Source, tag and number of a message or a receive."""

EVENTS = st.lists(
    st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 1), st.booleans()), min_size=1, max_size=40
)


@given(EVENTS)
def test_each_takes_the_earliest_that_fits_it(events: list[tuple[bool, int, int, bool]]) -> None:
    matching: Matching[int, int] = Matching()
    messages: list[Waiting] = []
    receives: list[Waiting] = []
    for number, (is_message, source, tag, is_any) in enumerate(events):
        mine = (None if is_any and not is_message else source, tag, number)
        others, own = (receives, messages) if is_message else (messages, receives)
        fitting = [each for each in others if each[1] == tag and (each[0] == mine[0] or None in (each[0], mine[0]))]
        expected = fitting[0] if fitting else None
        if is_message:
            assert matching.arrive(source, tag, number) == (expected and expected[2])
        else:
            assert matching.receive(mine[0], tag, number) == (expected and (expected[0], expected[2]))
        if expected:
            others.remove(expected)
        else:
            own.append(mine)


def test_a_transfer_ends_once_and_tells_everybody() -> None:
    transfer = Transfer(bytes_to_send(torch.ones(2)), 0)
    told: list[str] = []
    transfer.add_done(lambda: told.append("early"))
    error = RuntimeError("first")
    transfer.end(error)
    transfer.end()
    transfer.add_done(lambda: told.append("late"))
    assert transfer.done
    assert transfer.error is error
    assert told == ["early", "late"]


@pytest.mark.parametrize(
    ("answers", "number", "said", "unsaid"),
    [
        (
            {1: MemberAnswer(4, "", "  File train.py, line 7"), 2: MemberAnswer(5, "barrier()", "")},
            5,
            ["Missing: rank 1.", "has made 4 calls in it and is at\n  File train.py, line 7"],
            "2",
        ),
        # A member without the group.
        ({3: MemberAnswer(-1, "", "")}, 1, ["Rank 3 has not made this group and waits inside hvlike."], "No answer"),
        ({1: None, 2: MemberAnswer(9, "", "")}, 9, ["No answer from rank 1"], "Missing"),
        (
            {1: MemberAnswer(2, "broadcast(float32 [5])", "")},
            2,
            ["All have made this call", "rank 1 broadcast(float32 [5])"],
            "Missing",
        ),
    ],
    ids=["behind", "without the group", "silent", "all have called"],
)
def test_it_says_who_has_not_made_the_call_or_what_each_has_called(
    answers: dict[int, MemberAnswer | None], number: int, said: list[str], unsaid: str
) -> None:
    text = describe_missing(answers, number)
    assert [each for each in said if each not in text] == []
    assert unsaid not in text


def test_calls_that_were_long_ago_are_not_described() -> None:
    answers = {1: MemberAnswer(90, "", ""), 2: MemberAnswer(90, "barrier()", ""), 3: None}
    assert describe_calls(answers) == "rank 2 barrier()"
