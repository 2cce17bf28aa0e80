"""Do something once when the backward pass that is under way has ended.

hvlike.autograd runs a graph in parts, so the end of one of torch's passes means nothing there. It opens a Collected
around each part instead and, when all parts have run, reduces the modules that they came through.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hvlike.untraced import untraced


@untraced
class _Actions(dict[int, Callable[[], None]]):
    """In the order of numbers that are the same on all ranks, unlike the order in which backward adds."""

    def __call__(self) -> None:
        actions = sorted(self.items(), reverse=True)
        self.clear()
        # An error of one is raised when all have run: other ranks wait for the rest, too.
        with ExitStack() as calls:
            for _, action in actions:
                calls.callback(action)


class ModulePass:
    """One backward pass that comes through a module: from the first node that arms it to its last one.

        armed      a hook of an output, or the first gradient, has seen it; torch's engine holds what runs at its end
        reduces    a gradient has arrived or is sure to, so other ranks may wait for this one
        ended      its last node has run: what is left is reduced; or nothing is, as for autograd.grad()
        broken     it has failed: torch has dropped what would have run at its end

    Of passes inside of a pass (reentrant checkpoints) the first one that arms counts: arm in the first node for the
    outermost. A pass over several workers has no end here: its parts are `collected`.
    """

    __slots__ = ("_actions", "collected", "collects", "has_begun", "reduces", "twice")

    def __init__(self, collected: Collected | None) -> None:
        self.collected = collected  # What the parts of the pass have come through; None where it adds to `.grad`
        self.reduces = collected is not None
        self.has_begun = False  # The reduction: the reducer fits, and gradients are handed to it
        self.collects = False  # The reducer knows that gradients arrive: they only have to be noted
        self.twice: list[str] = []  # What has arrived too often
        self._actions: weakref.ref[_Actions] | None = None

    @property
    def armed(self) -> bool:
        """Whether torch's engine still runs it."""
        return self._actions is not None and self._actions() is not None

    def sees(self, collected: Collected | None) -> bool:
        """Whether this is the pass that the calling thread runs a part of; `collected`: that of the thread."""
        return self.armed or (collected is not None and self.collected is collected)

    def call_at_end(self, number: int, action: Callable[[], None]) -> None:
        """Call `action` after the last node, in its thread; the pass returns then.

        number: the place of the action among those of other modules.
        """
        task = torch._C._current_graph_task_id()
        actions = _passes.get(task)
        if actions is None:
            # The engine alone holds them: they are gone when the pass has failed.
            actions = _passes[task] = _Actions()
            _engine.queue_callback(actions)
        actions[number] = action
        self._actions = weakref.ref(actions)


_numbers = itertools.count()
_turns = itertools.count(-1, -1)


def next_number() -> int:
    """Return the place of a new module among those that act at the end of a pass.

    The order in which they are made is the same on all ranks.
    """
    return next(_numbers)


def next_turn() -> int:
    """Return a place before all others: that of a module which takes back what it shares with them."""
    return next(_turns)


_passes: weakref.WeakValueDictionary[int, _Actions] = weakref.WeakValueDictionary()

_engine: Any = torch.autograd.Variable._execution_engine


def is_inside_backward() -> bool:
    """Whether the calling thread is in a backward pass: a checkpoint computes its forward again there."""
    return torch._C._current_graph_task_id() != -1


_AccumulateGrad: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]


def will_reach(node: Any) -> bool:
    """Whether the pass under way runs this AccumulateGrad node: autograd.grad() does not, backward(inputs=...) some."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        # What autograd.grad() was asked for: it returns that gradient and adds it nowhere.
        return False


def adds_all_here() -> bool:
    """Whether the pass under way adds to `.grad` all gradients that it computes beyond the node that runs, and some.

    Visits the graph: for passes that come by and reach no parameter. All ranks must decide alike.
    """
    start = torch._C._current_autograd_node()
    seen, left, found = {start}, [start], False
    while left:
        for function, _ in left.pop().next_functions:
            if function is None or function in seen:
                continue
            if isinstance(function, _AccumulateGrad):
                if not will_reach(function):
                    return False
                found = True
            seen.add(function)
            left.append(function)
    return found


class Collected(_Actions):
    """The modules that the parts of one backward pass have come through."""

    def __init__(self, gradients: dict[Tensor, Tensor]) -> None:
        super().__init__()
        self.gradients = gradients


_KEY = "hvlike.training.ddp.end_of_backward"
_remove: Callable[[str], None] | None = getattr(torch._C, "_remove_obj_from_tls", None)


@cache
def _takes_reference() -> bool:
    """Whether torch drops a reference to what it has stashed that it has not counted, as torch 2.5 does."""
    probe, key = object(), f"{_KEY}.probe"
    before = sys.getrefcount(probe)
    torch._C._stash_obj_in_tls(key, probe)
    takes = sys.getrefcount(probe) == before
    if takes:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    if _remove is not None:
        _remove(key)
    return takes


def _stash(value: Collected | None) -> None:
    if _takes_reference():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    # torch's own thread-local storage: backward copies it to its threads for each GPU.
    torch._C._stash_obj_in_tls(_KEY, value)


def collection() -> Collected | None:
    """Return the Collected of the pass that this thread runs a part of; None where gradients go into `.grad`."""
    found: Collected | None = torch._C._get_obj_in_tls(_KEY) if torch._C._is_key_in_tls(_KEY) else None
    return found


class collecting:
    """A context around each part of a backward pass that this thread runs."""

    __slots__ = ("_before", "_into")

    def __init__(self, into: Collected) -> None:
        self._into = into

    def __enter__(self) -> None:
        self._before = collection()
        _stash(self._into)

    def __exit__(self, *_: object) -> None:
        if self._before is None and _remove is not None:
            # An object that is left when a thread ends while the interpreter ends aborts the process.
            _remove(_KEY)
        else:
            _stash(self._before)
