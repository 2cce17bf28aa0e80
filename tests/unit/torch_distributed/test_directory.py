"""What an error says of the members of a group, from what each has answered."""

from hvlike.torch_distributed.directory import Answer, describe_calls, describe_missing


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
