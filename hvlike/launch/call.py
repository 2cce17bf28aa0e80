"""What a job of hvd.run is handed and what it leaves, as files in one folder that all its ranks see.

call        the function, its arguments, and where modules are found
result.N    what rank N has returned
failure.N   the exception with which rank N has ended
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hvlike.errors import UsageError


@dataclass(frozen=True)
class Call:
    """What every rank does."""

    func: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


def write_call(folder: Path, call: Call) -> None:
    """Leave the call for the ranks. Raises: UsageError for what does not pickle."""
    name = getattr(call.func, "__qualname__", repr(call.func))
    if getattr(call.func, "__module__", None) == "__main__" and not has_cloudpickle():
        raise UsageError(
            f"run: {name} is defined in the program itself, or in a notebook, where the ranks cannot import it. "
            "Install cloudpickle, which sends such functions as they are (pip install cloudpickle), or put it into a "
            "module."
        )
    # The path travels by itself: what follows may need it to be read.
    write(folder / "call", pickle.dumps(_absolute(sys.path)) + packed(call, f"run: {name} or one of its arguments"))


def read_call(folder: Path) -> Call:
    """The call; modules are found as in the process that has left it."""
    with (folder / "call").open("rb") as file:
        path: list[str] = pickle.load(file)
        sys.path += [each for each in path if each not in sys.path]
        call: Call = pickle.load(file)
    return call


def packed(value: Any, what: str) -> bytes:
    """A value as bytes. what: how errors call it. Raises: UsageError for one that does not pickle."""
    pickler: Any = import_module("cloudpickle") if has_cloudpickle() else pickle
    try:
        data: bytes = pickler.dumps(value)
    except Exception as error:
        advice = "" if has_cloudpickle() else " cloudpickle can send more: pip install cloudpickle."
        raise UsageError(f"{what} does not pickle: {type(error).__name__}: {error}.{advice}") from error
    return data


def write(path: Path, data: bytes) -> None:
    """Write a file that is either whole or not there."""
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(data)
    part.rename(path)


def has_cloudpickle() -> bool:
    """Whether cloudpickle is installed."""
    return find_spec("cloudpickle") is not None


def _absolute(path: Sequence[str]) -> list[str]:
    """The search path for modules, for a process that may run in another folder."""
    return [os.path.abspath(each) for each in path]
