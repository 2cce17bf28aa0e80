"""The log has the rank in every record, and prints what the program does not handle; where the main thread is."""

import gc
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hvlike.observe.log import Printer, RankFilter, frame_of, main_stack, set_up_log


class Collecting(logging.Handler):
    """A handler of the program."""

    def __init__(self) -> None:
        super().__init__()
        self.ranks: list[int] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.ranks.append(vars(record)["rank"])


@contextmanager
def new_program() -> Iterator[logging.Logger]:
    """The logger where nobody has configured anything; afterwards it is as it was. pytest's own handlers are away."""
    logger, root = logging.getLogger("hvlike"), logging.getLogger()
    level, handlers, filters, of_root = logger.level, logger.handlers, logger.filters, root.handlers
    logger.setLevel(logging.NOTSET)
    logger.handlers, logger.filters, root.handlers = [], [], []
    try:
        yield logger
    finally:
        logger.setLevel(level)
        logger.handlers, logger.filters, root.handlers = handlers, filters, of_root


def say(logger: logging.Logger) -> None:
    for level in (logging.DEBUG, logging.INFO, logging.WARNING):
        logger.log(level, "a word")


@pytest.mark.parametrize(
    ("level", "rank", "printed"),
    [
        (None, 0, ["INFO", "WARNING"]),
        (None, 3, ["WARNING"]),
        ("debug", 3, ["DEBUG", "INFO", "WARNING"]),
        ("trace", 0, ["DEBUG", "INFO", "WARNING"]),
        ("error", 0, []),
        ("fatal", 0, []),
    ],
)
def test_what_is_printed_where_nobody_has_configured_logging(
    level: str | None, rank: int, printed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with new_program() as logger:
        set_up_log(level, rank, hide_time=True)
        say(logger)
        assert capsys.readouterr().err.splitlines() == [f"hvlike rank {rank} {each}: a word" for each in printed]


def test_the_handlers_of_the_program_get_the_rank_and_are_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with new_program() as logger:
        set_up_log(None, 2, hide_time=True)
        collecting = Collecting()
        # Also where the program configures logging only after init().
        logging.getLogger().addHandler(collecting)
        logger.warning("a word")
        assert collecting.ranks == [2]
        assert capsys.readouterr().err == ""
        logging.getLogger().removeHandler(collecting)
        logger.addHandler(collecting)
        logger.warning("a word")
        assert capsys.readouterr().err == ""
        set_up_log("info", 2, hide_time=True)
        logger.warning("a word")
        assert capsys.readouterr().err == "hvlike rank 2 WARNING: a word\n"
        assert collecting.ranks == [2, 2, 2]


def test_a_level_of_the_program_stays_and_the_time_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with new_program() as logger:
        logger.setLevel(logging.DEBUG)
        set_up_log(None, 0, hide_time=False)
        assert logger.level == logging.DEBUG
        logger.warning("a word")
        assert capsys.readouterr().err[:2] == "20"
        set_up_log("error", 0, hide_time=False)
        assert logger.level == logging.ERROR


def test_a_new_init_gives_a_new_rank_and_nothing_twice(capsys: pytest.CaptureFixture[str]) -> None:
    with new_program() as logger:
        set_up_log(None, 0, hide_time=True)
        set_up_log(None, 1, hide_time=True)
        assert logger.level == logging.WARNING
        say(logger)
        assert capsys.readouterr().err == "hvlike rank 1 WARNING: a word\n"
        assert [type(each) for each in logger.handlers] == [Printer]
        assert [type(each) for each in logger.filters] == [RankFilter]


def seen_from_a_thread() -> str:
    seen: list[str] = []
    thread = threading.Thread(target=lambda: seen.append(main_stack()))
    thread.start()
    thread.join()
    return seen[0]


def test_the_users_code_is_shown() -> None:
    stack = seen_from_a_thread()
    assert "in seen_from_a_thread" in stack
    assert stack.count("  File ") == 8


def test_a_wait_inside_hvlike_is_no_place() -> None:
    # The loop's own wait, as a traceback knows it.
    code = compile("def wait(look):\n    return look()\n", "/somewhere/hvlike/transport/loop/loop.py", "exec")
    names: dict[str, object] = {}
    exec(code, names)
    wait = names["wait"]
    assert callable(wait)
    assert wait(seen_from_a_thread) == ""


def test_the_main_thread_does_not_look_at_itself() -> None:
    assert main_stack() == ""


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="garbage is collected between bytecodes alone there")
def test_no_garbage_is_collected_while_threads_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a thread that starts or ends meanwhile, and this one, wait for each other for ever."""
    collects: list[bool] = []
    look = sys._current_frames
    monkeypatch.setattr(sys, "_current_frames", lambda: (collects.append(gc.isenabled()), look())[1])
    assert frame_of(threading.main_thread()) is not None
    assert (collects, gc.isenabled()) == ([False], True)
