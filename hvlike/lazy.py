"""Importing hvlike quickly: names are imported at first use, and no garbage is collected meanwhile."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def at_first_use(
    names: dict[str, Any], *modules: str, **places: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A `__getattr__` for a package, which imports some of its names when they are asked for, and its `__dir__`.

    names: the globals() of the package. modules: modules of it. places: of other names, the module that has each.
    Source: PEP 562.
    """

    def load(name: str) -> Any:
        if name in modules:
            return importlib.import_module(f"{names['__name__']}.{name}")
        if name in places:
            names[name] = getattr(importlib.import_module(places[name]), name)
            return names[name]
        raise AttributeError(f"module {names['__name__']!r} has no attribute {name!r}", name=name)

    return load, lambda: sorted({*names, *modules, *places})


@contextmanager
def without_collections() -> Iterator[None]:
    """Let Python collect no garbage in the block.

    Imports make objects that stay, and each full collection looks at all of torch's, too: 60 ms and more. So would the
    first one after the block, if they did not count as old then.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()
