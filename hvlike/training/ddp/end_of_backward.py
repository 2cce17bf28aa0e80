"""Do something once when the backward pass that is under way has ended."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Generic, TypeVar

import torch

Owner = TypeVar("Owner")


class EndOfBackward(Generic[Owner]):
    """Calls `action(owner)` after the last node of a backward pass, in its thread; the pass returns then.

    Armed from inside of the pass. In passes inside of a pass (reentrant checkpoints) it is the one that armed it first
    that counts: whoever wants the outermost arms in the first node. A pass that fails disarms. Several that are armed
    in one pass are called in the order in which they were made, which is the same on all ranks, unlike that of nodes.
    """

    def __init__(self, owner: Owner, action: Callable[[Owner], None]) -> None:
        """owner: held weakly."""
        self.number = next(_numbers)
        self._owner = weakref.ref(owner)
        self._action = action
        self._ending: weakref.ref[_Ending] | None = None

    @property
    def armed(self) -> bool:
        """Whether the pass under way will call."""
        return self._ending is not None and self._ending() is not None

    def arm(self) -> None:
        """Call when the pass under way has ended; once, however often this is said."""
        if not self.armed:
            task = torch._C._current_graph_task_id()
            ending = _endings.get(task)
            if ending is None:
                ending = _endings[task] = _Ending()
                _engine.queue_callback(ending)
            ending.armed.append(self)
            self._ending = weakref.ref(ending)

    def call(self) -> None:
        """The pass has ended."""
        self._ending = None
        owner = self._owner()
        if owner is not None:
            self._action(owner)


class _Ending:
    """What the engine calls at the end of one pass. The engine alone holds it: it is gone when the pass has failed."""

    def __init__(self) -> None:
        self.armed: list[EndOfBackward[Any]] = []

    def __call__(self) -> None:
        # An error of one is raised when all have been called: other ranks wait for the rest, too.
        with ExitStack() as calls:
            for each in sorted(self.armed, key=lambda each: each.number, reverse=True):
                calls.callback(each.call)


_endings: weakref.WeakValueDictionary[int, _Ending] = weakref.WeakValueDictionary()
"""Of the passes under way, by the number that torch has given them."""

_numbers = itertools.count()


def is_inside_backward() -> bool:
    """Whether the calling thread is in a backward pass: a checkpoint computes its forward again there."""
    return torch._C._current_graph_task_id() != -1


_engine: Any = torch.autograd.Variable._execution_engine
"""What runs backward passes."""
