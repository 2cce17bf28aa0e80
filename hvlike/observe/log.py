"""The log, for those who set HVLIKE_LOG_LEVEL: printed on stderr, as Horovod's is. Else Python's logging decides."""

from __future__ import annotations

import logging

_LEVELS = {"trace": logging.DEBUG, "fatal": logging.CRITICAL}


_NAME = "hvlike-printer"
"""By this name the next init() finds the handler that was added here."""


def show_log(level: str, rank: int, *, hide_time: bool) -> None:
    """Print the records of the logger "hvlike" from `level` up, with the rank and, if wanted, the time."""
    logger = logging.getLogger("hvlike")
    logger.setLevel(_LEVELS.get(level, level.upper()))
    for handler in [each for each in logger.handlers if each.get_name() == _NAME]:
        logger.removeHandler(handler)
    printer = logging.StreamHandler()
    printer.set_name(_NAME)
    time = "" if hide_time else "%(asctime)s "
    printer.setFormatter(logging.Formatter(f"{time}hvlike rank {rank} %(levelname)s: %(message)s"))
    logger.addHandler(printer)
