"""Who is asked and what is reported where ranks wait for long, or do not come to the end of the job."""

import logging
from collections.abc import Callable
from typing import Any

import pytest

from hvlike.collectives.health.shutdown_barrier import MissingRanksReport
from hvlike.collectives.health.stall_inspector import PING, PeerProbe, StallLimits, StatusQuery, answer_of
from hvlike.errors import StalledError
from hvlike.system.system import system

KEY = ("allreduce", "x")


@pytest.fixture(autouse=True)
def _warnings_are_seen(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="hvlike")


class Loop:
    """Does at once what is posted; time is over at once."""

    def post(self, action: Callable[[], None], *, wake: bool) -> None:
        action()

    def wait(self, done: Callable[[], bool], seconds: float) -> bool:
        return done()


class Job:
    """Rank 2 of the set, in which rank 0 coordinates; ranks 1 to 3 are on one node."""

    def __init__(self, answering: dict[int, str], limits: StallLimits, leader: int = 0) -> None:
        self.answering = answering
        self.asked: list[int] = []
        loop: Any = Loop()
        self.probe = PeerProbe(loop, 2, 0, leader, (1, 2, 3), self.send, lambda rank: f"seen {rank}", limits)

    def send(self, rank: int, what: str, asked: float) -> None:
        assert what == PING
        self.asked.append(rank)
        if rank in self.answering:
            self.probe.hear(rank, (asked, self.answering[rank]))

    def check(self, waited: float, *, agreed: bool, done: bool = False) -> StalledError | None:
        return self.probe.check(KEY, waited, agreed, lambda: done)


def test_a_coordinator_that_answers_reports_itself(caplog: pytest.LogCaptureFixture) -> None:
    job = Job({0: "at x"}, StallLimits(1.0, 2.0))
    assert job.check(100.0, agreed=False) is None
    assert job.asked == [0]
    assert caplog.text == ""


def test_a_coordinator_that_is_stuck_is_reported_and_the_wait_ends_at_its_limit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = Job({}, StallLimits(1.0, 5.0))
    assert job.check(4.0, agreed=False) is None
    assert "rank 2 has waited for 4 s in allreduce 'x', and nobody can say for which rank: rank 0" in caplog.text
    assert "\n  rank 0 does not answer; seen 0" in caplog.text
    error = job.check(5.0, agreed=False)
    assert isinstance(error, StalledError)
    assert str(error).startswith("A wait took more than 5 s (HVLIKE_STALL_SHUTDOWN_TIME_SECONDS): rank 2 has waited")


def test_on_several_nodes_the_leader_of_its_own_is_asked_too(caplog: pytest.LogCaptureFixture) -> None:
    job = Job({0: ""}, StallLimits(1.0, 5.0), leader=1)
    assert job.check(4.0, agreed=False) is None
    assert sorted(job.asked) == [0, 1]
    assert "nobody can say for which rank: rank 1, through which this node asks, is stuck" in caplog.text
    assert "\n  rank 1 does not answer; seen 1" in caplog.text
    assert "rank 0 " not in caplog.text
    assert isinstance(job.check(5.0, agreed=False), StalledError)


def test_a_coordinator_that_was_only_busy_does_not_end_a_long_wait() -> None:
    job = Job({0: ""}, StallLimits(1.0, 5.0))
    assert job.check(100.0, agreed=False) is None
    job.answering.clear()
    assert job.check(104.0, agreed=False) is None


def test_data_that_do_not_come_are_asked_for_at_the_neighbours(caplog: pytest.LogCaptureFixture) -> None:
    job = Job({0: "", 1: "  File x, in fail"}, StallLimits(1.0))
    assert job.check(4.0, agreed=True) is None
    assert sorted(job.asked) == [0, 1, 3]
    assert "rank 2 has waited for 4 s in allreduce 'x', for the data: all ranks have asked for it" in caplog.text
    assert (
        "\n  rank 0 waits inside hvlike\n  rank 1 is at\n  File x, in fail\n  rank 3 does not answer; seen 3"
        in caplog.text
    )


def test_a_wait_that_has_ended_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    assert Job({}, StallLimits(1.0, 2.0)).check(100.0, agreed=True, done=True) is None
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("limits", "seconds"),
    [
        (StallLimits(60.0), 60.0),
        (StallLimits(60.0, 5.0), 5.0),
        (StallLimits(None, 5.0), 5.0),
        (StallLimits(None), None),
    ],
)
def test_the_first_look_is_at_the_shorter_limit(limits: StallLimits, seconds: float | None) -> None:
    assert Job({}, limits).probe.limits.shortest == seconds


def test_an_answer_names_its_question() -> None:
    assert answer_of(3.5) == (3.5, "")


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
