"""The interface between RPC and distributed autograd: what autograd adds to messages.

RPC knows only the id of a context and keeps it per thread. A request carries the context id of its caller's thread, the
function runs under that id, and the reply carries the id of the request, whichever thread sends it. hvlike.autograd
installs its AutogradHooks here when it is imported; hvlike.rpc imports it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

from hvlike.errors import RpcError

if TYPE_CHECKING:
    from hvlike.rpc.agent.agent import Agent

T = TypeVar("T")

NO_CONTEXT = -1
NO_MESSAGE = 0  # Stands for the id of a message in which no tensor requires grad
Note = tuple[int, int]  # What a message says about autograd: (context id, message id)


class AutogradHooks(Protocol):
    """What distributed autograd does for RPC on one worker. Called from any thread; no method but `backward` blocks."""

    def begin(self, agent: Agent) -> None:
        """A session begins; the agent does not receive messages yet."""

    def end(self) -> None: ...
    def sent(self, context: int, rank: int, about: str, graded: Sequence[Tensor]) -> Note | None:
        """A message to `rank` is packed. Returns None if the context does not exist any more.

        about: the name of the function, for reports. graded: the tensors that require grad.
        """

    def left(self, note: Note) -> None:
        """A message is queued for the loop. The calling thread waits next, so there is time for work ahead."""

    def came(self, note: Note, rank: int, graded: Sequence[Tensor]) -> Sequence[Tensor]:
        """A message from `rank` is opened, and creates the context here. Returns what replaces `graded`, its leaves."""

    def unwanted(self, note: Note, rank: int) -> None:
        """A message from `rank` will never be opened. Runs in a pool thread."""

    def gradients(self, context: int) -> dict[Tensor, Tensor]:
        """Return the gradients of this worker's leaves. Raises: RuntimeError for an unknown context."""

    def backward(self, context: int, roots: list[Tensor], retain_graph: bool, /) -> None:
        """Run hvlike.autograd.backward from these tensors. Blocks."""


class _Installed:
    hooks: AutogradHooks


class _ThisThread(threading.local):
    context = NO_CONTEXT  # The id of the context in which the calling thread is


this_thread = _ThisThread()


def install_autograd_hooks(hooks: AutogradHooks) -> None:
    _Installed.hooks = hooks


def autograd_hooks() -> AutogradHooks:
    return _Installed.hooks


class in_context:
    """Context manager: run the block under another context id; around every request that is served."""

    __slots__ = ("_before", "_context")

    def __init__(self, context: int) -> None:
        self._context = context

    def __enter__(self) -> None:
        self._before, this_thread.context = this_thread.context, self._context

    def __exit__(self, *_: object) -> None:
        this_thread.context = self._before


def bind_context(context: int, work: Callable[[], None]) -> Callable[[], None]:
    """Return `work` bound to a context id, for whichever thread runs it."""
    return work if context == NO_CONTEXT else partial(_run_as_caller, context, True, work)


def bind_caller(work: Callable[[T], None]) -> Callable[[T], None]:
    """Return `work` bound to the context id and the grad mode of the calling thread."""
    return partial(_run_as_caller, this_thread.context, torch.is_grad_enabled(), work)


def _run_as_caller(context: int, grad_enabled: bool, work: Callable[..., None], *values: Any) -> None:
    with in_context(context), torch.set_grad_enabled(grad_enabled):
        work(*values)


def unknown_context(context: int) -> RuntimeError:
    return RpcError(f"Could not find autograd context with id: {context}")
