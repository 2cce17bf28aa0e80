"""A rank that waits long finds out whether the coordinator and its neighbours still answer."""

import logging
from collections.abc import Callable
from typing import Any

import pytest

from hvlike.collectives.health.stall_inspector import PING, PeerProbe, StallLimits, answer_of
from hvlike.errors import StalledError

KEY = ("allreduce", "x")


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
    with caplog.at_level(logging.WARNING, logger="hvlike"):
        assert job.check(4.0, agreed=False) is None
    assert "rank 2 has waited for 4 s in allreduce 'x', and nobody can say for which rank: rank 0" in caplog.text
    assert "\n  rank 0 does not answer; seen 0" in caplog.text
    error = job.check(5.0, agreed=False)
    assert isinstance(error, StalledError)
    assert str(error).startswith("A wait took more than 5 s (HVLIKE_STALL_SHUTDOWN_TIME_SECONDS): rank 2 has waited")


def test_on_several_nodes_the_leader_of_its_own_is_asked_too(caplog: pytest.LogCaptureFixture) -> None:
    job = Job({0: ""}, StallLimits(1.0, 5.0), leader=1)
    with caplog.at_level(logging.WARNING, logger="hvlike"):
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
    with caplog.at_level(logging.WARNING, logger="hvlike"):
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
