"""The log: Python's logger "hvlike", with the rank in every record.

A program that configures logging decides what happens to the records. Without that they are printed on stderr: INFO
and above from rank 0, WARNING and above from all ranks. HVLIKE_LOG_LEVEL prints its level and above from every rank,
whatever the program configures. Reports of ranks that keep others waiting show the `main_stack` of these.

A warning may never end what it warns of: what a handler or a filter of the program raises does not come out of a call
of hvlike. The record is printed on stderr then.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import traceback
from logging import LogRecord
from types import FrameType
from typing import Any

from hvlike.observe import printing

_LEVELS = {"trace": logging.DEBUG, "fatal": logging.CRITICAL}


class RankFilter(logging.Filter):
    """Adds `record.rank` to every record."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def filter(self, record: logging.LogRecord) -> bool:
        record.rank = self.rank
        return True


def shown_rank() -> int | None:
    """The rank that the log and errors show; None before init()."""
    filters = logging.getLogger("hvlike").filters
    return next((each.rank for each in filters if isinstance(each, RankFilter)), None)


class Printer(logging.Handler):
    """Prints to the current sys.stderr, which a notebook or a test may have replaced."""

    def __init__(self, level_set: int, *, steps_aside: bool) -> None:
        """level_set: the level that the logger got with it. steps_aside: print only records without other handlers."""
        super().__init__()
        self.level_set = level_set
        self._steps_aside = steps_aside

    def emit(self, record: logging.LogRecord) -> None:
        if not (self._steps_aside and self._others()):
            # One write, or the lines of several ranks are shuffled.
            printing.write(self.format(record))

    def _others(self) -> bool:
        """Whether the program has handlers for the records of hvlike. It may add them at any time."""
        logger = logging.getLogger("hvlike")
        return len(logger.handlers) > 1 or (logger.propagate and logging.getLogger().hasHandlers())


class _Unfailing(logging.Logger):
    """A logger that raises nothing, whatever handlers, filters and kinds of records are the program's."""

    def makeRecord(self, name: str, level: int, fn: str, lno: int, msg: object, args: Any, *more: Any) -> LogRecord:
        try:
            return super().makeRecord(name, level, fn, lno, msg, args, *more)
        except Exception:
            return LogRecord(name, level, fn, lno, msg, args, None)

    def handle(self, record: logging.LogRecord) -> None:
        try:
            super().handle(record)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                raise
            printing.write(
                f"hvlike {record.levelname}: {_text_of(record)}\n{_HANDLER_FAILED.format(type(error).__name__)}"
            )


_HANDLER_FAILED = "(printed here because a logging handler of the program has raised {})"


def _text_of(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:
        return str(record.msg)


def unfailing(logger: logging.Logger) -> None:
    """Have a logger, which is what the program gets by its name, raise nothing. A second call does nothing."""
    if not isinstance(logger, _Unfailing):
        # The program may have set a class of its own for loggers.
        logger.__class__ = type("Logger", (_Unfailing, type(logger)), {})


unfailing(logging.getLogger("hvlike"))


def set_up_log(level: str | None, rank: int, *, hide_time: bool) -> None:
    """level: HVLIKE_LOG_LEVEL; None where it is not set: a level that the program has given the logger stays then."""
    logger = logging.getLogger("hvlike")
    before = logging.NOTSET
    for handler in [each for each in logger.handlers if isinstance(each, Printer)]:
        before = handler.level_set
        logger.removeHandler(handler)
    for old in [each for each in logger.filters if isinstance(each, RankFilter)]:
        logger.removeFilter(old)
    logger.addFilter(RankFilter(rank))
    if level is not None:
        logger.setLevel(_LEVELS.get(level, level.upper()))
    elif logger.level in (logging.NOTSET, before):
        logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    printer = Printer(logger.level, steps_aside=level is None)
    time = "" if hide_time else "%(asctime)s "
    printer.setFormatter(logging.Formatter(f"{time}hvlike rank %(rank)s %(levelname)s: %(message)s"))
    logger.addHandler(printer)


_FRAMES = 8
_WAIT = os.path.join("hvlike", "transport", "loop", "loop.py")


def frame_of(thread: threading.Thread) -> FrameType | None:
    """Return the innermost frame of a thread; None where it has ended.

    Before Python 3.12 a garbage collection in `sys._current_frames` can stop the process for ever, as another thread
    starts or ends (CPython issue 106883): none begins there.
    """
    holds_off = sys.version_info < (3, 12) and gc.isenabled()
    if holds_off:
        gc.disable()
    try:
        return sys._current_frames().get(thread.ident or 0)
    finally:
        if holds_off:
            gc.enable()


def main_stack() -> str:
    """Return the innermost calls of the main thread like a traceback, or "" while it waits inside hvlike: 50 us."""
    innermost = frame_of(threading.main_thread())
    if innermost is None or threading.current_thread() is threading.main_thread() or _waits(innermost):
        return ""
    # It reads the program's sources, and the program may have replaced what reads them.
    try:
        return "".join(traceback.format_stack(innermost, _FRAMES)).rstrip("\n")
    except Exception as error:
        return f"  (its stack cannot be shown: {type(error).__name__})"


def _waits(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "wait" and frame.f_code.co_filename.endswith(_WAIT):
            return True
        frame = frame.f_back
    return False
