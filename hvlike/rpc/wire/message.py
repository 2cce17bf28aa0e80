"""What travels between workers: requests, replies, and exceptions.

An exception travels as a description, not as an object: its class need not exist on the caller and its arguments need
not pickle. The description holds the text, the remote traceback, and enough to build an exception of the right class.
"""

from __future__ import annotations

import importlib
import logging
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hvlike.rpc.wire.autograd_hooks import NO_CONTEXT, Note
from hvlike.rpc.wire.single_tensor import Body


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """The name and the rank of a worker; a value: equal where both are, usable as a key, sendable.

    name: as given to init_rpc. id: its rank.
    Source: torch.distributed.rpc.WorkerInfo.
    """

    name: str
    id: int

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"

    def __reduce__(self) -> tuple[Any, ...]:
        return WorkerInfo, (self.name, self.id)


logger = logging.getLogger("hvlike")

KEPT = {"ValueError": ValueError, "TypeError": TypeError}
"""Classes that a caller sees; every other one comes as a RuntimeError."""

_ESCAPE = re.compile(r"""\\(?:([\\'"abfnrtv\n])|([0-7]{1,3})|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4}))""")
_MEANING = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "\n": ""}


class Description(NamedTuple):
    """An exception on its way: strings only."""

    name: str
    module: str
    qualname: str
    family: str
    """The class that a caller sees: a key of KEPT, else "RuntimeError"."""
    obstacle: str
    """Why no exception of its class can be made of one text; empty if it can."""
    text: str


def describe_error(error: BaseException, worker: WorkerInfo) -> Description:
    """What the caller needs to know of an exception that a function has raised on this worker.

    Prints its traceback to what sys.stderr is now. Never raises, whatever the exception does when it is looked at.
    """
    said = f"On {worker}:\n{_representation(error)}\n{_traceback(error)}"
    _show(said)
    cls = type(error)
    family = "RuntimeError"
    if not isinstance(error, RuntimeError):
        family = next((name for name, kept in KEPT.items() if isinstance(error, kept)), family)
    text = unescaped(said)
    return Description(cls.__name__, cls.__module__, cls.__qualname__, family, _obstacle(cls, text), text)


def rebuild_error(description: Description, *, original: bool = False) -> Exception:
    """The exception to raise at the caller.

    original: one of the class that was raised, where that can be found and built here (RRef.to_here). Else a
        ValueError, a TypeError, or a RuntimeError, whose text begins with the name of that class.
    """
    if description.obstacle:
        return RuntimeError(
            f"{description.name}: no exception of this class can be made of a text ({description.obstacle}). "
            f"Original exception on remote side was {description.text}"
        )
    if original:
        cls = _find(description)
        if cls is not None and not _obstacle(cls, description.text):
            return cls(description.text)
    return KEPT.get(description.family, RuntimeError)(f"{description.name}: {description.text}")


def unescaped(text: str) -> str:
    """The text with real line ends, quotes and backslashes in place of their escapes.

    Taking all of it for escapes once more (`decode("unicode_escape")`) then changes no text of ASCII characters. NUL
    stays an escape: it would end the text inside torch's futures.
    """
    text = text.encode("utf-8", "replace").decode("utf-8").replace("\0", "\\x00")
    before = None
    while text != before:
        before, text = text, _ESCAPE.sub(_meaning, text)
    return text


def _meaning(escape: re.Match[str]) -> str:
    letter, octal, *hexadecimal = escape.groups()
    if letter is not None:
        return _MEANING.get(letter, letter)
    digits = next((digits for digits in hexadecimal if digits is not None), "0")
    code = int(octal, 8) if octal is not None else int(digits, 16)
    return chr(code) if 0 < code < 128 else escape.group()


def _representation(error: BaseException) -> str:
    try:
        return repr(error)
    except Exception as failure:
        return f"{type(error).__name__}(...) whose repr() raises {type(failure).__name__}"


def _traceback(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except Exception as failure:
        return f"{type(error).__name__} (its traceback cannot be shown: {type(failure).__name__})\n"


def _show(text: str) -> None:
    if sys.stderr is None:
        return
    try:
        print(text, file=sys.stderr)
    except Exception as failure:
        logger.debug("a remote traceback could not be printed: %s", failure)


def _obstacle(cls: type[BaseException], text: str) -> str:
    """Why `cls(text)` fails; empty if it does not, or if callers never see this class."""
    if not issubclass(cls, Exception):
        return ""
    try:
        cls(text)
    except Exception as failure:
        return unescaped(_representation(failure))
    return ""


def _find(description: Description) -> type[Exception] | None:
    """The class that was raised there, as it is here."""
    try:
        found: object = importlib.import_module(description.module)
        for name in description.qualname.split("."):
            found = getattr(found, name)
    except Exception as failure:
        logger.debug("%s.%s is not here: %s", description.module, description.qualname, failure)
        return None
    return found if isinstance(found, type) and issubclass(found, Exception) else None


CALL, REMOTE, FETCH = 1, 2, 3
"""Kinds of requests: rpc_sync and rpc_async; remote; RRef.to_here. Other files add their own from 10 on."""


class Packed(NamedTuple):
    """A value as it travels."""

    body: Body
    """A stream of pickle, protocol 5, and more behind it; see pickler.py."""
    storages: list[torch.Tensor]
    """One-dimensional contiguous CPU tensors of bytes, sent out of band and received straight into fresh memory."""
    note: Note | None = None
    """What it says of autograd, where it was made inside of a context."""

    @property
    def context(self) -> int:
        """The context that it was made in."""
        return NO_CONTEXT if self.note is None else self.note[0]


class Call:
    """A request as its sender sees it, and in time its reply."""

    __slots__ = ("done", "error", "failure", "kind", "rank", "reply", "then", "timeout")

    def __init__(self, rank: int, kind: int, timeout: float, then: Callable[[Call], None] | None) -> None:
        self.rank = rank
        """The worker that serves it."""
        self.kind = kind
        self.timeout = timeout
        """Seconds; 0: none."""
        self.then = then
        self.done = False
        self.reply: Packed | None = None
        """The result, where the function returned."""
        self.failure: Any = None
        """What remote_error.describe made there of the exception, where it raised."""
        self.error: Exception | None = None
        """Why there is no answer: the time limit, a worker that is gone, a shutdown."""


class Request:
    """A request as the worker that serves it sees it; exactly one of `answer` and `fail` is called, once."""

    __slots__ = ("_respond", "about", "answers_last", "came", "kind", "number", "packed", "source")

    def __init__(
        self,
        source: int,
        number: int,
        kind: int,
        packed: Packed,
        came: float,
        respond: Callable[[Request, Packed | BaseException | Description], None],
    ) -> None:
        self.source = source
        """Rank of the caller."""
        self.number = number
        """The caller's number of this call."""
        self.kind = kind
        self.packed = packed
        self.came = came
        """When it arrived, in seconds of time.monotonic()."""
        self.about: object = ""
        """The function it asks for, once that is known, or words; for reports (callables.described)."""
        self.answers_last = False
        """The answer is the last thing that the handler does, in its own thread, which sends it when it listens again.

        So what the caller sends next finds this thread listening, and none has to be woken for it.
        """
        self._respond = respond

    def answer(self, packed: Packed) -> None:
        """Send the result; from any thread. The storages must not change until they have left."""
        self._respond(self, packed)

    def fail(self, error: BaseException | Description) -> None:
        """Send an exception instead, or what describe has made of one earlier; from any thread."""
        self._respond(self, error)
