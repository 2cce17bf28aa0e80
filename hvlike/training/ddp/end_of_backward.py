"""Do something once when the backward pass that is under way has ended.

hvlike.autograd runs a graph in parts, so the end of one of torch's passes says nothing there. It opens a Collected
around
each part instead and, when all parts have run, reduces what was collected.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

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


class Reduces(Protocol):
    """The gradients of a module."""

    @property
    def number(self) -> int:
        """In the order in which they were made, which is the same on all ranks."""

    def reduce_in(self, gradients: dict[Tensor, Tensor]) -> None:
        """Reduce those that are in a map, by leaf, and not in `.grad`."""


class Collected:
    """The modules that one backward pass has come through."""

    def __init__(self, gradients: dict[Tensor, Tensor]) -> None:
        """gradients: where those of the leaves are when all has run."""
        self._gradients = gradients
        self._modules: dict[Reduces, None] = {}

    def __bool__(self) -> bool:
        return bool(self._modules)

    def add(self, module: Reduces) -> None:
        """The pass has come through this module."""
        self._modules[module] = None

    def reduce(self) -> None:
        """Reduce what was collected. Collective over the process sets of the modules; blocks."""
        modules, self._modules = self._modules, {}
        # In one order on all ranks. An error of one is raised after all: other ranks wait for the rest, too.
        with ExitStack() as calls:
            for module in sorted(modules, key=lambda module: module.number, reverse=True):
                calls.callback(module.reduce_in, self._gradients)


_KEY = "hvlike.training.ddp.end_of_backward"
_remove: Callable[[str], None] | None = getattr(torch._C, "_remove_obj_from_tls", None)


def collection() -> Collected | None:
    """That of the pass that this thread runs a part of; None where gradients go into `.grad`."""
    found: Collected | None = torch._C._get_obj_in_tls(_KEY) if torch._C._is_key_in_tls(_KEY) else None
    return found


class collecting:
    """A part of a backward pass runs meanwhile, from this thread; around every part."""

    __slots__ = ("_before", "_into")

    def __init__(self, into: Collected) -> None:
        self._into = into

    def __enter__(self) -> None:
        self._before = collection()
        # torch's own kind of thread-local: a backward pass takes it along to the threads that it has for each GPU.
        torch._C._stash_obj_in_tls(_KEY, self._into)

    def __exit__(self, *_: object) -> None:
        if self._before is None and _remove is not None:
            # What is left there when a thread ends while the interpreter does aborts the process.
            _remove(_KEY)
        else:
            torch._C._stash_obj_in_tls(_KEY, self._before)
