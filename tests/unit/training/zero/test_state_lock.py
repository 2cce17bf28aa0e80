"""Copies of a state and changes of it keep apart, and a copy is never waited for in the loop."""

import threading

import pytest

from hvlike.training.zero.sharded_state import StateLock


def in_another_thread(changes: StateLock, *, wait: bool) -> bool:
    """Whether a copy may be made there."""
    found = []

    def look() -> None:
        with changes.copy(wait=wait) as allowed:
            found.append(allowed)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found[0]


def test_no_copy_during_a_change() -> None:
    changes = StateLock()
    with changes.change():
        assert changes.under_way
        assert not in_another_thread(changes, wait=False)
        # Also who would wait for another copy does not wait for a change: it may be his own.
        assert not in_another_thread(changes, wait=True)
        with changes.copy(wait=True) as allowed:
            assert not allowed
    assert not changes.under_way
    assert in_another_thread(changes, wait=False)


def test_the_loop_does_not_wait_for_a_copy() -> None:
    changes = StateLock()
    with changes.copy(wait=True) as allowed:
        assert allowed
        assert not changes.under_way
        assert not in_another_thread(changes, wait=False)
    assert in_another_thread(changes, wait=True)


def test_a_change_that_fails_is_over() -> None:
    changes = StateLock()
    with pytest.raises(ZeroDivisionError), changes.change():
        raise ZeroDivisionError
    assert in_another_thread(changes, wait=False)
