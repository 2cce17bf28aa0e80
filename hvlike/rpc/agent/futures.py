"""The futures of rpc_async: torch's own, completed with what the reply brings.

torch knows two kinds of failed futures. One is made in C++: `torch.futures.wait_all` leaves at once when it meets it,
but it is always a RuntimeError, and Python reaches it only by raising in a callback of `then`. The other one keeps a
Python exception as its value and raises it in `wait`, so `wait_all` sees it only after all others. Here RuntimeErrors
are of the first kind and other classes of the second.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, cast

import torch

from hvlike.rpc.wire.devices import DeviceMaps

logger = logging.getLogger("hvlike")


class Promise:
    """The side of a torch future that completes it.

    future: what the user waits for. Callbacks that he adds run in the thread that completes it and may block.
    """

    __slots__ = ("_base", "_devices", "_error", "_value", "future")

    def __init__(self, through: Callable[[Any], Any] | None = None, devices: DeviceMaps | None = None) -> None:
        """through: given a future that completes first, makes the one which `future` follows.

        devices: where the value may be; whoever takes it has his streams wait for those that have made it.
        """
        self._devices = devices
        self._value: Any = None
        self._error: Exception | None = None
        self._base: Any = torch._C.Future([])
        before = self._base if through is None else through(self._base)
        # What a callback of `then` raises, and only that, fails a future in C++.
        self.future = cast("torch.futures.Future[Any]", before.then(self._outcome))

    def set_result(self, value: Any) -> None:
        """Complete the future, once, from any thread; runs its callbacks."""
        self._value = value
        marks = None if self._devices is None else self._devices.marks()
        if marks is not None:
            # Called in the thread that takes the value, in callbacks too.
            self.future._set_unwrap_func(lambda _: marks.follow())
        self._complete()

    def set_error(self, error: Exception) -> None:
        """Fail the future, once, from any thread; runs its callbacks."""
        if isinstance(error, RuntimeError):
            self._error = error
        else:
            # Without its traceback: that may hold this very promise, and no collector sees into torch's futures.
            self._value = _twin(error)
            self.future._set_unwrap_func(_raise_anew)
        self._complete()

    def _outcome(self, _: Any) -> Any:
        value, error = self._value, self._error
        self._value = self._error = None
        if error is not None:
            raise error.with_traceback(None) from None
        return value

    def _complete(self) -> None:
        try:
            self._base.set_result(None)
        except RuntimeError as refusal:
            # The program has called set_result on the future that rpc_async gave it.
            logger.debug("a future of rpc_async was completed before its reply came: %s", refusal)


def _raise_anew(value: Any) -> Any:
    """Raise an equal exception: the traceback of one that the future keeps would keep its waiters' frames alive."""
    if isinstance(value, Exception):
        raise _twin(value) from None
    return value


def _twin(error: Exception) -> Exception:
    try:
        twin = type(error)(*error.args)
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    twin.__dict__.update(error.__dict__)
    return twin
