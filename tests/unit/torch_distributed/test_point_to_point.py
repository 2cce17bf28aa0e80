"""Which receive gets which message, by source and tag, in the order of the calls; what errors say of the members."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvlike.torch_distributed.directory import Answer, describe_calls, describe_missing
from hvlike.torch_distributed.endpoint import Transfer
from hvlike.torch_distributed.point_to_point import Matching
from hvlike.torch_distributed.tensor_bytes import bytes_to_send


@pytest.fixture
def matching() -> Matching[str, str]:
    return Matching()


def test_receives_wait_in_the_order_of_their_calls(matching: Matching[str, str]) -> None:
    assert matching.receive(2, 0, "for 2") is None
    assert matching.receive(None, 0, "for any") is None
    assert matching.receive(1, 0, "for 1") is None
    assert matching.arrive(1, 0, "x") == "for any"
    assert matching.arrive(1, 0, "y") == "for 1"
    assert matching.arrive(1, 0, "z") is None
    assert matching.arrive(2, 0, "w") == "for 2"


def test_any_source_takes_the_earliest_that_has_come(matching: Matching[str, str]) -> None:
    for source, text in ((2, "a"), (1, "b"), (2, "c")):
        matching.arrive(source, 0, text)
    assert matching.receive(1, 0, "r") == (1, "b")
    assert matching.receive(None, 0, "r") == (2, "a")
    assert matching.receive(None, 0, "r") == (2, "c")


def test_receives_of_a_lost_rank_are_taken_out(matching: Matching[str, str]) -> None:
    for source, name in ((1, "a"), (2, "b"), (None, "c")):
        matching.receive(source, 7, name)
    assert matching.take_receives(lambda source, _: source in (None, 1)) == ["a", "c"]
    assert matching.arrive(1, 7, "late") is None
    assert matching.arrive(2, 7, "x") == "b"
    assert matching.take_messages() == [(1, "late")]
    assert matching.receive(1, 7, "d") is None


EVENTS = st.lists(
    st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 1), st.booleans()), min_size=1, max_size=40
)


@given(EVENTS)
def test_none_waits_for_what_is_there_and_order_is_kept(events: list[tuple[bool, int, int, bool]]) -> None:
    matching: Matching[int, tuple[int | None, int]] = Matching()
    numbers = itertools.count()
    got: dict[tuple[int, int], list[int]] = {}
    messages: list[tuple[int, int]] = []
    receives: list[tuple[int | None, int]] = []
    for is_message, source, tag, is_any in events:
        if is_message:
            number = next(numbers)
            receive = matching.arrive(source, tag, number)
            if receive is None:
                messages.append((source, tag))
            else:
                assert receive[0] in (None, source)
                receives.remove(receive)
                got.setdefault((source, tag), []).append(number)
        else:
            wanted = None if is_any else source
            found = matching.receive(wanted, tag, (wanted, tag))
            if found is None:
                receives.append((wanted, tag))
            else:
                assert wanted in (None, found[0])
                messages.remove((found[0], tag))
                got.setdefault((found[0], tag), []).append(found[1])
        for wanted, its_tag in receives:
            assert not any(tag == its_tag and wanted in (None, source) for source, tag in messages)
    assert all(numbers == sorted(numbers) for numbers in got.values())


def test_a_transfer_ends_once_and_tells_everybody() -> None:
    import torch

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
