"""How the public face is imported quickly: modules at their first use, and no garbage collection meanwhile."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


def at_first_use(names: dict[str, Any], *modules: str) -> tuple[Callable[[str], ModuleType], Callable[[], list[str]]]:
    """A `__getattr__` for a package, which imports these of its modules when they are asked for, and its `__dir__`.

    names: the globals() of the package. Source: PEP 562.
    """

    def load(name: str) -> ModuleType:
        if name in modules:
            return importlib.import_module(f"{names['__name__']}.{name}")
        raise AttributeError(f"module {names['__name__']!r} has no attribute {name!r}", name=name)

    return load, lambda: sorted({*names, *modules})


@contextmanager
def without_collections() -> Iterator[None]:
    """Let Python collect no garbage in the block.

    Imports make objects that stay, and each full collection looks at all of torch's, too: 60 ms and more.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
