"""The operation in flight: how it ends, and who hears of that."""

import threading

import pytest

from hvlike.backends.operation import Operation, OperationState


def test_the_first_end_counts() -> None:
    operation = Operation()
    operation.value = 7
    operation.end()
    operation.end(KeyError("late"))
    assert operation.state is OperationState.DONE
    assert operation.result() == 7


def test_what_has_failed_raises_for_everybody_who_waits() -> None:
    operation = Operation()
    operation.begin()
    assert operation.state is OperationState.RUNNING
    operation.end(KeyError("expected"))
    for _ in range(2):
        with pytest.raises(KeyError, match="expected"):
            operation.result()


def test_the_fence_is_called_by_each_who_waits() -> None:
    calls: list[int] = []
    operation = Operation()
    operation.fence = lambda: calls.append(threading.get_ident())
    operation.end()
    operation.wait()
    operation.result()
    assert len(calls) == 2


def test_callbacks_come_once_before_and_after_the_end() -> None:
    heard: list[str] = []
    operation = Operation()
    operation.then(lambda each: heard.append(f"before {each.state.value}"))
    assert not heard
    operation.end()
    operation.then(lambda each: heard.append(f"after {each.state.value}"))
    assert heard == ["before done", "after done"]


def test_callbacks_that_meet_the_end_come_once() -> None:
    heard: list[int] = []
    for turn in range(200):
        operation = Operation()
        thread = threading.Thread(target=operation.end)
        thread.start()
        for number in range(10):
            operation.then(lambda _, number=10 * turn + number: heard.append(number))
        thread.join()
    assert sorted(heard) == list(range(2000))


def test_what_nobody_ends_does_not_block_without_a_waiter() -> None:
    operation = Operation()
    assert not operation.wait(0.0)
    with pytest.raises(TimeoutError, match=r"Operation\(\d+, waiting\) has not ended within 0.0 s"):
        operation.result(0.0)
