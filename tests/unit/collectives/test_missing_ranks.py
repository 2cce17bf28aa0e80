"""The report of ranks that do not come to the end of the job: who, where, and the error past the limit."""

import logging

import pytest

from hvlike.collectives.health.shutdown_barrier import MissingRanksReport
from hvlike.collectives.health.stall_inspector import StallLimits, StatusQuery
from hvlike.errors import StalledError
from hvlike.system.system import system


class Clock:
    """Time that passes only when it is told to."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(system, "monotonic", clock.monotonic)
    return clock


def report(limits: StallLimits, asked: list[int]) -> tuple[MissingRanksReport, StatusQuery]:
    query = StatusQuery(lambda rank, when: asked.append(rank), lambda rank: f"seen {rank}")
    return MissingRanksReport(limits, query), query


def inspect(
    late: MissingRanksReport, query: StatusQuery, missing: list[int], clock: Clock, answers: dict[int, str]
) -> StalledError | None:
    coroutine = late.inspect(lambda: missing)
    next(coroutine)
    for rank, place in answers.items():
        query.hear(rank, (query.asked, place))
    try:
        if len(answers) < len(missing):
            next(coroutine)
            clock.now += 100
        next(coroutine)
    except StopIteration as stop:
        error: StalledError | None = stop.value
        return error
    raise AssertionError("goes on")


def test_it_asks_and_reports_where_they_are(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    asked: list[int] = []
    late, query = report(StallLimits(60.0), asked)
    clock.now += 59
    assert not late.is_due
    clock.now += 1
    assert late.is_due
    with caplog.at_level(logging.WARNING, logger="hvlike"):
        assert inspect(late, query, [1, 2, 3], clock, {1: "  File x, in fail", 3: ""}) is None
    assert asked == [1, 2, 3]
    assert "shutdown(), 160 s ago; ranks 1, 2, 3 have not." in caplog.text
    assert "  rank 1 is at\n  File x, in fail\n  rank 2 does not answer; seen 2\n  rank 3 waits inside" in caplog.text
    assert not late.is_due


def test_past_the_limit_it_is_an_error(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    late, query = report(StallLimits(None, 5.0), [])
    clock.now += 4
    assert not late.is_due
    clock.now += 1
    error = inspect(late, query, [1], clock, {1: "  File x, in fail"})
    assert isinstance(error, StalledError)
    assert "A wait took more than 5 s" in str(error)
    assert "rank 1 has not.\n  rank 1 is at\n  File x, in fail" in str(error)
    assert caplog.text == ""


def test_who_has_come_meanwhile_is_not_reported(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    late, _ = report(StallLimits(1.0, 2.0), [])
    clock.now += 50
    missing = [1]
    coroutine = late.inspect(lambda: missing)
    next(coroutine)
    missing.clear()
    with pytest.raises(StopIteration) as stop:
        next(coroutine)
    assert stop.value.value is None
    assert caplog.text == ""


def test_without_limits_nobody_is_asked(clock: Clock) -> None:
    late, _ = report(StallLimits(None, 0.0), [])
    clock.now += 1e9
    assert not late.is_due
