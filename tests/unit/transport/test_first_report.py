"""One process of a node reports; the others tell it that they failed, too, and leave the end of the job to it."""

import errno
import os
import socket
import time
import uuid
from collections.abc import Iterator

import pytest
from support.children import raised_in_child

from hvlike.transport.failure.first_report import FirstReport, describe_others, job_name


@pytest.fixture
def job() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def first(job: str) -> Iterator[FirstReport]:
    report = FirstReport(job)
    yield report
    report.release()


def test_the_first_one_reports_and_hears_of_the_others(job: str, first: FirstReport) -> None:
    assert first.claim(3, "ValueError: boom")
    assert first.claim(3, "again")
    assert first.others() == []
    second = FirstReport(job)
    assert not second.claim(0, "KeyError: 'x'")
    assert not second.claim(1, "")
    assert first.others() == [(0, "KeyError: 'x'"), (1, "")]
    assert first.others() == []
    assert second.others() == []


def test_other_jobs_have_reports_of_their_own(first: FirstReport) -> None:
    assert first.claim(0, "")
    other = FirstReport(uuid.uuid4().hex)
    assert other.claim(0, "")
    other.release()


def test_the_right_ends_with_its_process(job: str, first: FirstReport) -> None:
    def claim() -> None:
        assert FirstReport(job).claim(0, "")

    assert raised_in_child(claim) == ""
    assert first.claim(0, "")


def test_more_failures_than_a_socket_holds_are_no_error(job: str, first: FirstReport) -> None:
    assert first.claim(0, "")
    second = FirstReport(job)
    assert not any(second.claim(rank, "x" * 10_000) for rank in range(1000))
    assert first.others()[0][0] == 0


def test_what_others_send_there_does_no_harm(job: str, first: FirstReport) -> None:
    assert first.claim(0, "")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        for text in (b"", b"no number", b"-1 x", b"\xff\xff", b"7 \x1b[2Jtext"):
            stranger.sendto(text, first.address)
    assert first.others() == [(7, "[2Jtext")]


def test_waiting_ends_with_the_holder_and_at_the_deadline(job: str, first: FirstReport) -> None:
    second = FirstReport(job)
    # Nobody holds it: no wait, however far the deadline is.
    second.wait_for_holder(time.monotonic() + 10_000)
    assert first.claim(0, "")
    second.wait_for_holder(time.monotonic() + 0.1)
    # Who holds it himself does not wait for himself.
    first.wait_for_holder(time.monotonic() + 10_000)


def test_the_others_are_described_in_a_line() -> None:
    others = [(4, "A: b"), (2, "KeyError: 'x'"), (0, "A: b")]
    assert describe_others(others, "A: b") == "ranks 0, 4 (the same), rank 2 (KeyError: 'x')"
    assert describe_others(others[:1], "A: b") == "rank 4 (the same)"
    many = describe_others([(rank, f"E{rank}") for rank in range(9)], "A: b")
    assert many == "rank 0 (E0), rank 1 (E1), rank 2 (E2), rank 3 (E3) and 5 more"


def test_a_job_is_named_by_its_launcher_and_when_that_began() -> None:
    assert job_name(os.getpid()) == job_name(os.getpid())
    assert job_name(os.getpid()) != job_name(os.getppid())
    assert job_name(2**22 + 1) == f"{2**22 + 1}-0"


def test_any_letter_is_told(job: str, first: FirstReport) -> None:
    assert first.claim(0, "")
    assert not FirstReport(job).claim(1, "ValueError: \ud800")
    assert first.others() == [(1, "ValueError: \\ud800")]


def test_without_sockets_everybody_reports(first: FirstReport, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "socket", fail)
    assert first.claim(0, "")
    assert first.others() == []
    first.wait_for_holder(time.monotonic() + 60)
