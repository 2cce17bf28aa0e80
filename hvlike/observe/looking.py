"""What only looks: warnings, checksums, reports. It may be wrong or missing, but never raise, and change nothing.

A program may hold anything: tensors without plain memory, options whose methods raise. Whoever looks at them for a
warning or a report does it in a function with this decorator, and says what stands for an answer that it cannot get.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

_P = ParamSpec("_P")
_T = TypeVar("_T")

logger = logging.getLogger("hvlike")


def only_looks(otherwise: Any) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Return a decorator: what the function raises is told to the log once, at level DEBUG, and `otherwise` returned.

    For functions without messages: the ranks would no longer agree on what comes next.
    """

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        told = False

        @functools.wraps(function)
        def look(*arguments: _P.args, **keywords: _P.kwargs) -> _T:
            nonlocal told
            try:
                return function(*arguments, **keywords)
            except Exception as error:
                if not told:
                    told = True
                    # Not its text: that may be made by what has raised it.
                    logger.debug("%s could not look: %s", function.__qualname__, type(error).__name__)
                return cast(_T, otherwise)

        return look

    return decorate
