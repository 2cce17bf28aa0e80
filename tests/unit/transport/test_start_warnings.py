"""What init() says while it waits and before it starts MPI, and how it gives up."""

import logging
import os
import re
import threading
from types import SimpleNamespace

import pytest

from hvlike.transport.failure.watchdog import init_watchdog
from hvlike.transport.host import mpi_library


class Heard(logging.Handler):
    """Sets an event at the first record."""

    def __init__(self) -> None:
        super().__init__()
        self.event = threading.Event()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()
        self.event.set()


def test_a_long_wait_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "2")
    logger, heard = logging.getLogger("hvlike"), Heard()
    logger.addHandler(heard)
    try:
        with init_watchdog(0.001, 0.0, lambda text, summary: None):
            assert heard.event.wait(60)
    finally:
        logger.removeHandler(heard)
    assert heard.text.startswith("rank 2 of 3 on ")
    assert "has waited 0 s in init() for other ranks" in heard.text


def test_past_the_limit_it_gives_up_and_says_where_it_is() -> None:
    gave_up = threading.Event()
    said: list[str] = []

    def give_up(text: str, summary: str) -> None:
        said.extend((text, summary))
        gave_up.set()

    with init_watchdog(1000.0, 0.001, give_up):
        assert gave_up.wait(60)
    assert said[1] == "StalledError: init() took more than 0.001 s (HVLIKE_STALL_SHUTDOWN_TIME_SECONDS)"
    # On a busy machine this thread is still about to begin its wait.
    assert re.search(r'File ".*", line \d+, in \w+', said[0])


def test_an_init_in_time_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with init_watchdog(1000.0, 1000.0, lambda text, summary: pytest.fail(text)):
        pass
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("free", "size", "rank", "warns"),
    [
        (0, 64, "0", True),
        (3000, 65536, "0", True),
        (3000, 65536, "1", False),
        (9000, 65536, "0", False),
        (0, 0, "0", False),
    ],
)
def test_a_full_shared_memory_is_said_by_one_rank_of_the_node(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, free: int, size: int, rank: str, warns: bool
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", rank)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=free, f_blocks=size, f_frsize=1024))
    mpi_library.warn_if_shm_full("/")
    assert (f"/ has {free} KiB free of {size} KiB" in caplog.text) is warns
