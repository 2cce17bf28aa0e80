"""Routines side by side: all advance in every turn, none is left running."""

import pytest

from hvlike.backends.waves import side_by_side
from hvlike.transport.loop.coroutine import Coroutine, Wait


def waiting(waits: list[Wait], log: list[str], name: str) -> Coroutine[None]:
    try:
        for wait in waits:
            log.append(name)
            yield wait
    finally:
        log.append(f"end of {name}")


def test_each_advances_once_in_a_turn() -> None:
    log: list[str] = []
    both = side_by_side([waiting([Wait.NOTIFY] * 3, log, "a"), waiting([Wait.NOTIFY] * 1, log, "b")])
    next(both)
    assert log == ["a", "b"]
    next(both)
    assert log == ["a", "b", "a", "end of b"]


def test_the_most_urgent_wait_counts() -> None:
    bell, poll, again = [Wait.NOTIFY] * 2, [Wait.POLL] * 2, [Wait.AGAIN] * 2
    for together, wait in (([bell, bell], Wait.NOTIFY), ([poll, bell], Wait.POLL), ([bell, again, poll], Wait.AGAIN)):
        assert next(side_by_side([waiting(each, [], "") for each in together])) is wait


def test_what_has_ended_may_have_freed_another() -> None:
    both = side_by_side([waiting([Wait.NOTIFY] * 3, [], "a"), waiting([], [], "b")])
    assert next(both) is Wait.AGAIN
    assert next(both) is Wait.NOTIFY


def test_it_ends_with_the_last() -> None:
    log: list[str] = []
    assert len(list(side_by_side([waiting([Wait.POLL] * count, log, "x") for count in (1, 4, 2)]))) == 4
    assert log.count("end of x") == 3
    assert list(side_by_side([])) == []


def test_an_error_closes_the_others() -> None:
    def failing() -> Coroutine[None]:
        yield Wait.NOTIFY
        raise OSError("broken")

    log: list[str] = []
    both = side_by_side([waiting([Wait.NOTIFY] * 9, log, "a"), failing(), waiting([Wait.NOTIFY] * 9, log, "b")])
    next(both)
    with pytest.raises(OSError, match="broken"):
        next(both)
    assert {"end of a", "end of b"} <= set(log)


def test_giving_up_closes_all() -> None:
    log: list[str] = []
    both = side_by_side([waiting([Wait.NOTIFY] * 9, log, "a"), waiting([Wait.NOTIFY] * 9, log, "b")])
    next(both)
    both.close()
    assert {"end of a", "end of b"} <= set(log)
