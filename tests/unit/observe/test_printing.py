"""What is printed comes to stderr once, whatever stands in for it; the log has the rank; where the main thread is."""

import contextlib
import errno
import gc
import io
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from hvlike.observe import printing
from hvlike.observe.log import Printer, RankFilter, frame_of, main_stack, set_up_log, unfailing

TEXT = "hvlike: größe 鍵\nTraceback\nValueError: fehlt für \ud800"


class Quit(BaseException):
    """Nothing that `except Exception` stops."""


class Tee:
    """What programs write themselves: no flush, no closed, no encoding."""

    def __init__(self, *files: Any) -> None:
        self._files = files

    def write(self, text: str) -> None:
        for each in self._files:
            each.write(text)


class LineTee(Tee):
    def write(self, text: str) -> None:
        for line in text.splitlines(keepends=True):
            super().write(line)


class Failing:
    """Every method raises, and so does every attribute."""

    def __getattr__(self, name: str) -> Any:
        raise Quit(name)


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "disk full")


class Kept(io.StringIO):
    """Keeps what it is given until it is flushed, to a full disk."""

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "disk full")


def closed() -> io.StringIO:
    file = io.StringIO()
    file.close()
    return file


def ascii_file() -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding="ascii")


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, no stream is given up; none has been."""
    monkeypatch.setattr(printing, "REPORT_SECONDS", 60.0)
    monkeypatch.setattr(printing.ProgramStreams, "are_stuck", False)


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Python's own stderr."""
    file = io.StringIO()
    monkeypatch.setattr(sys, "__stderr__", file)
    return file


STANDINS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda real: real,
    "None": lambda real: None,
    "tee": Tee,
    "tee to an ASCII file": lambda real: Tee(real, ascii_file()),
    "tee from an ASCII file": lambda real: Tee(ascii_file(), real),
    "tee line by line to a full disk": lambda real: LineTee(real, Full()),
    "tee to a closed file": lambda real: Tee(real, closed()),
    "tee from a closed file": lambda real: Tee(closed(), real),
    "closed": lambda real: closed(),
    "full disk": lambda real: Full(),
    "full disk, seen late": lambda real: Kept(),
    "raises": lambda real: Failing(),
    "no stream at all": lambda real: 7,
}


@pytest.mark.parametrize("put", [printing.write, printing.report])
@pytest.mark.parametrize("what", STANDINS)
def test_a_text_comes_to_stderr_once(
    what: str, put: Callable[[str], None], real: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", STANDINS[what](real))
    put(TEXT)
    said = real.getvalue()
    assert said.count("ValueError: fehlt f") == 1, said
    assert said.startswith(("hvlike: größe 鍵\n", "hvlike: gr\\xf6\\xdfe \\u9375\n"))
    # What was there is there again.
    assert "write" not in vars(real)


def test_letters_that_a_stream_does_not_know_are_written_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    data = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(data, encoding="ascii"))
    printing.report("größe \ud800")
    assert data.getvalue() == b"gr\\xf6\\xdfe \\ud800\n"


def test_a_copy_on_file_is_whole_though_the_screen_came_first(
    real: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = ascii_file()
    monkeypatch.setattr(sys, "stderr", Tee(real, file))
    printing.report("größe")
    file.flush()
    assert isinstance(file.buffer, io.BytesIO)
    assert (real.getvalue(), file.buffer.getvalue()) == ("größe\n", b"gr\\xf6\\xdfe\n")


def test_a_stream_that_blocks_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = threading.Lock()

    class Blocked(Tee):
        def write(self, text: str) -> None:
            with lock:
                pass

    reader, writer = os.pipe()
    with lock, os.fdopen(writer, "w") as real, os.fdopen(reader) as pipe:
        monkeypatch.setattr(sys, "stderr", Blocked())
        monkeypatch.setattr(sys, "__stderr__", real)
        printing.report("a report", seconds=0.1)
        assert pipe.readline() == "a report\n"


def test_a_pipe_that_nobody_reads_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    with os.fdopen(reader, "rb") as pipe, os.fdopen(writer, "w") as real:
        monkeypatch.setattr(sys, "stderr", real)
        monkeypatch.setattr(sys, "__stderr__", real)
        began = time.monotonic()
        printing.report("a report", seconds=0.1)
        assert time.monotonic() - began < 60
        # The thread that is stuck in it goes on before the pipe is closed.
        while b"a report\n" not in pipe.read1():
            pass


def test_without_a_stderr_from_the_start_no_descriptor_is_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setattr(sys, "__stderr__", None)
    assert printing.descriptor_of_stderr() is None
    printing.report("nobody is told")


def test_a_stderr_that_the_program_has_closed_is_found_by_its_number(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("stderr", "__stderr__"):
        monkeypatch.setattr(sys, name, closed())
    printing.report("still here")
    assert capfd.readouterr().err == "still here\n"


def test_ctrl_c_interrupts_a_write(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Tee):
        def write(self, text: str) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stderr", Slow())
    with pytest.raises(KeyboardInterrupt):
        printing.write("a word")


def test_an_exception_that_cannot_be_shown_is_named_with_its_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> Any:
        raise Quit

    class Hostile(ValueError):
        __str__ = __repr__ = fail

    try:
        raise Hostile
    except Hostile as error:
        kind, caught, trace = type(error), error, error.__traceback__
    assert "Hostile" in printing.traceback_of(kind, caught, trace)
    monkeypatch.setattr(traceback, "format_exception", fail)
    monkeypatch.setattr(traceback, "format_exception_only", fail)
    text = printing.traceback_of(kind, caught, trace)
    assert text.startswith("Traceback (most recent call last):\n  File ")
    assert text.endswith("in test_an_exception_that_cannot_be_shown_is_named_with_its_lines\nHostile\n")


@contextlib.contextmanager
def handled_by(handler: logging.Handler) -> Iterator[logging.Logger]:
    logger = logging.getLogger("hvlike")
    logger.addHandler(handler)
    yield logger
    logger.removeHandler(handler)


@pytest.mark.parametrize("error", [OSError("full"), Quit()])
@pytest.mark.parametrize("place", ["handle", "filter"])
def test_what_a_logging_handler_raises_stays_inside(
    error: BaseException, place: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(record: logging.LogRecord) -> bool:
        raise error

    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit" if place == "handle" else "filter", fail)
    with handled_by(handler) as logger:
        logger.warning("rank %d waits", 3)
    assert "hvlike WARNING: rank 3 waits\n" in capsys.readouterr().err


def test_records_of_a_kind_that_fails_are_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> logging.LogRecord:
        raise TypeError

    previous = logging.getLogRecordFactory()
    with handled_by(logging.StreamHandler(sys.stderr)) as logger:
        logging.setLogRecordFactory(fail)
        try:
            logger.warning("rank %d waits", 3)
        finally:
            logging.setLogRecordFactory(previous)
    assert "rank 3 waits\n" in capsys.readouterr().err


def test_the_logger_of_another_class_keeps_it() -> None:
    class Own(logging.Logger):
        own = True

    logger = Own("test_printing.own")
    unfailing(logger)
    unfailing(logger)
    assert isinstance(logger, Own)
    assert logger.own


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
