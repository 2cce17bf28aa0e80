"""The table behind a store: who is told what, and when."""

from hvlike.torch_distributed.key_value_table import Answer, Table

FIRST, SECOND = (0, 1), (1, 1)


def test_a_call_is_answered_at_once() -> None:
    table = Table()
    assert table.call(FIRST, "set", "key", b"value") == [(FIRST, Answer(True, None))]
    assert table.call(FIRST, "get", "key") == [(FIRST, Answer(True, b"value"))]
    assert table.call(SECOND, "check", ["key", "other"]) == [(SECOND, Answer(True, False))]


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


def test_compare_set_as_tcp_store_has_it() -> None:
    table = Table()
    steps = [
        (("new", b"other", b"mine"), b"other"),  # Missing: not set
        (("new", b"", b"mine"), b"mine"),
        (("new", b"", b"late"), b"mine"),
        (("new", b"mine", b"second"), b"second"),
    ]
    for arguments, told in steps:
        assert table.call(FIRST, "compare_set", *arguments) == [(FIRST, Answer(True, told))]
    assert table.call(FIRST, "num_keys") == [(FIRST, Answer(True, 1))]
