"""What travels between workers, and what both ends of a call hold of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from hvlike.rpc.contexts import NO_CONTEXT, Note
from hvlike.rpc.remote_error import Description
from hvlike.rpc.single import Body

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
