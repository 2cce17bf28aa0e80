"""The log has the rank in every record, and prints what the program does not handle itself."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hvlike.observe.log import Printer, RankFilter, set_up_log


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


def test_a_level_of_the_program_stays() -> None:
    with new_program() as logger:
        logger.setLevel(logging.DEBUG)
        set_up_log(None, 0, hide_time=False)
        assert logger.level == logging.DEBUG
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


def test_the_time_is_printed_unless_hidden(capsys: pytest.CaptureFixture[str]) -> None:
    with new_program() as logger:
        set_up_log(None, 0, hide_time=False)
        logger.warning("a word")
        assert capsys.readouterr().err[:2] == "20"
