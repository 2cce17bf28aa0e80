"""Do something once when the backward pass that is under way has ended."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

Owner = TypeVar("Owner")


class EndOfBackward(Generic[Owner]):
    """Calls `action(owner)` after the last node of a backward pass, in its thread; the pass returns then.

    Armed from inside of the pass. In passes inside of a pass (reentrant checkpoints) it is the one that armed it first
    that counts: whoever wants the outermost arms in the first node. A pass that fails disarms.
    """

    def __init__(self, owner: Owner, action: Callable[[Owner], None]) -> None:
        """owner: held weakly."""
        self._owner = weakref.ref(owner)
        self._action = action
        self._call: weakref.ref[_Call] | None = None
        """The engine alone holds what it will call: it is gone when the pass has failed."""

    @property
    def armed(self) -> bool:
        """Whether the pass under way will call."""
        return self._call is not None and self._call() is not None

    def arm(self) -> None:
        """Call when the pass under way has ended; once, however often this is said."""
        if not self.armed:
            call = _Call(self._run)
            self._call = weakref.ref(call)
            _engine.queue_callback(call)

    def _run(self) -> None:
        self._call = None
        owner = self._owner()
        if owner is not None:
            self._action(owner)


class _Call:
    """What the engine calls."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action

    def __call__(self) -> None:
        self._action()


def is_inside_backward() -> bool:
    """Whether the calling thread is in a backward pass: a checkpoint computes its forward again there."""
    return torch._C._current_graph_task_id() != -1


_engine: Any = torch.autograd.Variable._execution_engine
"""What runs backward passes."""
