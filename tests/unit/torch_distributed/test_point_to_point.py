"""Which receive gets which message, by source and tag, in the order of the calls; what errors say of the members."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from hvlike.torch_distributed.directory import Answer, describe_calls, describe_missing
from hvlike.torch_distributed.endpoint import Transfer
from hvlike.torch_distributed.point_to_point import Matching
from hvlike.torch_distributed.tensor_bytes import bytes_to_send


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


def test_who_has_not_made_the_call_is_missing() -> None:
    text = describe_missing({1: Answer(4, "", "  File train.py, line 7"), 2: Answer(5, "barrier()", "")}, 5)
    assert text.startswith("Missing: rank 1.")
    assert "has made 4 calls in it and is at\n  File train.py, line 7" in text
    assert "2" not in text


def test_a_member_without_the_group_has_not_made_it() -> None:
    assert "Rank 3 has not made this group and waits inside hvlike." in describe_missing({3: Answer(-1, "", "")}, 1)


def test_who_does_not_answer_is_named() -> None:
    text = describe_missing({1: None, 2: Answer(9, "", "")}, 9)
    assert "No answer from rank 1" in text
    assert "Missing" not in text


def test_where_all_have_made_the_call_it_says_what_each_has_called() -> None:
    text = describe_missing({1: Answer(2, "broadcast(float32 [5])", "")}, 2)
    assert "All have made this call" in text
    assert "rank 1 broadcast(float32 [5])" in text


def test_calls_that_were_long_ago_are_not_described() -> None:
    answers = {1: Answer(90, "", ""), 2: Answer(90, "barrier()", ""), 3: None}
    assert describe_calls(answers) == "rank 2 barrier()"
