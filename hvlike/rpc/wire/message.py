"""What travels between workers: requests, replies, and exceptions.

An exception travels as a description, not as an object: its class need not exist on the caller and its arguments need
not pickle. The description holds the text, the remote traceback, and enough to build an exception of the right class.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hvlike.errors import WorkerLostError
from hvlike.observe import printing
from hvlike.rpc.wire.autograd_hooks import NO_CONTEXT, Note
from hvlike.rpc.wire.tensors import Body


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """The name and the rank of a worker. A value: comparable, hashable, and sendable through RPC.

    Source: torch.distributed.rpc.WorkerInfo.
    """

    name: str
    """As given to init_rpc."""
    id: int
    """The rank."""

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"

    def __reduce__(self) -> tuple[Any, ...]:
        return WorkerInfo, (self.name, self.id)


logger = logging.getLogger("hvlike")
_find_operator: Callable[[Any], str | None] = getattr(torch.jit._builtins, "_find_builtin", lambda func: None)

KEPT = {"ValueError": ValueError, "TypeError": TypeError}  # A caller gets these as they are, others as RuntimeError
_FROM_CALLBACK = "Got the following error when running the callback: WorkerLostError: "
"""What a torch future says whose callback has raised it, as a RuntimeError."""

_ESCAPE = re.compile(r"""\\(?:([\\'"abfnrtv\n])|([0-7]{1,3})|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4}))""")
_MEANING = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "\n": ""}


class Description(NamedTuple):
    """An exception as it travels, without objects of its own."""

    name: str
    module: str
    qualname: str
    family: str  # The class that the caller gets: a key of KEPT, or "RuntimeError"
    obstacle: str  # Why the class cannot be called with one text; empty if it can
    text: str
    lost: tuple[int, ...] | None = None  # The workers whose loss it tells of; None: it does not


def describe_error(error: BaseException, worker: WorkerInfo) -> Description:
    """Describe an exception and print its traceback to stderr. Never raises, whatever the exception's methods do."""
    trace = printing.traceback_of(type(error), error, error.__traceback__)
    said = f"On {worker}:\n{_representation(error)}\n{trace}"
    printing.write(said)
    cls = type(error)
    family = "RuntimeError"
    if not isinstance(error, RuntimeError):
        family = next((name for name, kept in KEPT.items() if isinstance(error, kept)), family)
    text = unescaped(said)
    lost = lost_ranks(error)
    return Description(cls.__name__, cls.__module__, cls.__qualname__, family, _obstacle(cls, text), text, lost)


def lost_ranks(error: BaseException) -> tuple[int, ...] | None:
    """Return the workers whose loss an exception tells of, empty where it does not say which; None: of none."""
    if isinstance(error, WorkerLostError):
        return tuple(error.ranks)
    return () if type(error) is RuntimeError and _FROM_CALLBACK in _representation(error) else None


def rebuild_error(description: Description, *, original: bool = False) -> Exception:
    """Return the exception to raise at the caller: a WorkerLostError, one of KEPT, or another RuntimeError. The text
    begins with its class's name.

    original: one of the class that was raised, if this worker can find and build it (RRef.to_here).
    """
    if description.obstacle:
        return RuntimeError(
            f"{description.name}: no exception of this class can be made of a text ({description.obstacle}). "
            f"Original exception on remote side was {description.text}"
        )
    if description.lost is not None:
        return WorkerLostError(f"{description.name}: {description.text}", description.lost)
    if original:
        cls = _find(description)
        if cls is not None and not _obstacle(cls, description.text):
            return cls(description.text)
    return KEPT.get(description.family, RuntimeError)(f"{description.name}: {description.text}")


def unescaped(text: str) -> str:
    """Return the text with real line ends, quotes and backslashes in place of their escapes.

    After that `decode("unicode_escape")` changes no ASCII text. NUL stays an escape: it would end the text inside
    torch's futures.
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
    except BaseException as failure:
        return f"{type(error).__name__}(...) whose repr() raises {type(failure).__name__}"


def _obstacle(cls: type[BaseException], text: str) -> str:
    """Return why `cls(text)` fails; empty if it works, or if callers never get this class."""
    if not issubclass(cls, Exception):
        return ""
    try:
        cls(text)
    except Exception as failure:
        return unescaped(_representation(failure))
    return ""


def _find(description: Description) -> type[Exception] | None:
    """Return this worker's class of that name, if it has one."""
    try:
        found: object = importlib.import_module(description.module)
        for name in description.qualname.split("."):
            found = getattr(found, name)
    except Exception as failure:
        logger.debug("%s.%s is not here: %s", description.module, description.qualname, failure)
        return None
    return found if isinstance(found, type) and issubclass(found, Exception) else None


def function_name(func: Any) -> str:
    """Return the name of a function in reports and profiles; torch's operators by their own names (aten::mul)."""
    return str(_find_operator(func) or getattr(func, "__qualname__", type(func).__qualname__))


def describe_subject(about: object) -> str:
    """Return what a message is about: `about` itself if it is a str, else the name of that function."""
    return about if isinstance(about, str) else function_name(about)


# Message types: of calls, counted for the detection of the session's end; of the shutdown, not counted (shutdown.py).
REQUEST, ANSWER, FAILURE, REFUSAL, NOTICE = range(5)
STATUS_QUERY, STATUS, LEAVING, IDLE_REPORT, WAVE_RESULT = range(5, 10)
CALL, REMOTE, FETCH = 1, 2, 3  # Kinds of requests: rpc_sync and rpc_async; remote; RRef.to_here


class Packed(NamedTuple):
    """A value as it travels."""

    body: Body  # A pickle stream of protocol 5 and what follows it; see pickler.py
    storages: list[torch.Tensor]  # 1-dimensional contiguous uint8 CPU tensors, out of band and received into new memory
    note: Note | None = None  # What the message says about autograd, if it was packed inside a context

    @property
    def context(self) -> int:
        """The id of the context in which it was packed."""
        return NO_CONTEXT if self.note is None else self.note[0]


@dataclass(eq=False, slots=True)
class ServedRequest:
    """A request on the worker that serves it."""

    source: int  # Rank of the caller
    number: int  # The caller's number of this call
    kind: int
    packed: Packed
    came: float  # When it arrived, in seconds of system.monotonic()
    respond: Callable[[ServedRequest, Packed | BaseException | Description], None]
    about: object = ""  # The requested function, once it is known, or words; for reports (see describe_subject)
    # True if the handler answers last: its thread sends the reply when it drives the loop again, and is there for the
    # caller's next message.
    answers_last: bool = False

    def answer(self, result: Packed | BaseException | Description) -> None:
        """Send the result or an exception, once. From any thread. Storages must not change until they are sent."""
        self.respond(self, result)
