"""The interface between RPC and distributed autograd: what autograd adds to messages.

RPC knows only the id of a context, and keeps it per thread: a request carries the context id of its caller's thread,
the function runs under that id, and the reply carries the id of the request, whichever thread sends it. hvlike.autograd
installs the rest here.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor

from hvlike.errors import RpcError

if TYPE_CHECKING:
    from hvlike.rpc.agent.agent import Agent


T = TypeVar("T")

NO_CONTEXT = -1
NO_MESSAGE = 0
"""Stands for the number of a message none of whose tensors requires grad."""

Note = tuple[int, int]
"""What a message says of autograd: context, message."""


class AutogradHooks(Protocol):
    """What distributed autograd does for RPC on one worker. From any thread; nothing here blocks."""

    def begin(self, agent: Agent) -> None:
        """A session of RPC begins: before the agent takes messages."""

    def end(self) -> None:
        """The session has ended on this worker."""

    def sent(self, context: int, rank: int, about: str, graded: Sequence[Tensor]) -> Note | None:
        """A message to a worker is packed. graded: its tensors that require grad. about: the function, for reports.

        None: there is no such context any more, the message says nothing of it.
        """

    def left(self, note: Note) -> None:
        """A message is put down for the loop, in which the calling thread waits or listens next: there is time then."""

    def came(self, note: Note, rank: int, graded: Sequence[Tensor]) -> Sequence[Tensor]:
        """A message of a worker is opened: what stands in place of its tensors that require grad, which are leaves.

        The context exists here from now on, unless it has been released.
        """

    def unwanted(self, note: Note, rank: int) -> None:
        """A message of a worker will never be opened. In a thread of its own time."""

    def gradients(self, context: int) -> dict[Tensor, Tensor]:
        """The gradients of this worker's leaves. Raises: RuntimeError for a context that is not here."""

    def backward(self, context: int, roots: list[Tensor], retain_graph: bool) -> None:
        """Run backward from these tensors, see hvlike.autograd.backward. Blocks."""


class _NoHooks:
    """Stands in while hvlike.autograd is not there."""

    def begin(self, agent: Agent) -> None:
        pass

    def end(self) -> None:
        pass

    def sent(self, context: int, rank: int, about: str, graded: Sequence[Tensor]) -> Note | None:
        return None

    def left(self, note: Note) -> None:
        pass

    def came(self, note: Note, rank: int, graded: Sequence[Tensor]) -> Sequence[Tensor]:
        return graded

    def unwanted(self, note: Note, rank: int) -> None:
        pass

    def gradients(self, context: int) -> dict[Tensor, Tensor]:
        raise unknown_context(context)

    def backward(self, context: int, roots: list[Tensor], retain_graph: bool) -> None:
        raise unknown_context(context)


class _Process:
    contexts: AutogradHooks = _NoHooks()


class _OfThread(threading.local):
    context = NO_CONTEXT


_of_thread = _OfThread()


def install_autograd_hooks(contexts: AutogradHooks) -> None:
    """Have `contexts` look after the messages of this process."""
    _Process.contexts = contexts


def let_autograd_in() -> None:
    """Have hvlike.autograd put itself in here, before a session: other workers may use it. It is above: by its name."""
    importlib.import_module("hvlike.autograd")


def autograd_hooks() -> AutogradHooks:
    """What looks after the messages of this process."""
    return _Process.contexts


def current_context() -> int:
    """The context of this thread."""
    return _of_thread.context


class in_context:
    """Make `context` the one of this thread while the block lasts; around every request that is served."""

    __slots__ = ("_before", "_context")

    def __init__(self, context: int) -> None:
        self._context = context

    def __enter__(self) -> None:
        self._before, _of_thread.context = _of_thread.context, self._context

    def __exit__(self, *_: object) -> None:
        _of_thread.context = self._before


def note_to(rank: int, about: str) -> Note | None:
    """What a message without tensors says that this thread sends to a worker."""
    context = current_context()
    return None if context == NO_CONTEXT else autograd_hooks().sent(context, rank, about, ())


def bind_context(context: int, work: Callable[[], None]) -> Callable[[], None]:
    """`work`, to be run inside of `context`, whichever background thread runs it."""
    return work if context == NO_CONTEXT else partial(_run_inside, context, work)


def keep_context(work: Callable[[T], None]) -> Callable[[T], None]:
    """`work`, to be run as if it were here: in the context and with the grad mode of the thread that calls this."""
    return partial(_run_as, current_context(), torch.is_grad_enabled(), work)


def _run_inside(context: int, work: Callable[[], None]) -> None:
    with in_context(context):
        work()


def _run_as(context: int, graded: bool, work: Callable[[T], None], given: T) -> None:
    with in_context(context), torch.set_grad_enabled(graded):
        work(given)


def unknown_context(context: int) -> RuntimeError:
    """What is raised for a context that is not here."""
    return RpcError(f"Could not find autograd context with id: {context}")
