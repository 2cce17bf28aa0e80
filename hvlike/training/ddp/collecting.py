"""Backward passes that collect gradients elsewhere than in `.grad`: which modules they have come through.

Such a pass (hvlike.autograd) runs the graph in parts, so the end of one of torch's passes says nothing. Whoever runs it
opens a Collected around each part and, when all have run, reduces what was collected.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Protocol

import torch
from torch import Tensor


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


_KEY = "hvlike.training.ddp.collecting"
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
