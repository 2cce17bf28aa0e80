"""Importing hvlike quickly: names are imported at first use, and no garbage is collected meanwhile."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def at_first_use(
    names: dict[str, Any], *modules: str, others: str, **places: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package that imports names at their first use (PEP 562).

    names: the globals() of the package. modules: its modules. places: the module of each other name. others: the
    module that has all the rest, and `__all__`; it is imported as a whole. Later uses cost what those of any module do.
    """

    def load(name: str) -> Any:
        if name in modules:
            return importlib.import_module(f"{names['__name__']}.{name}")
        if name in places:
            names[name] = getattr(importlib.import_module(places[name]), name)
            return names[name]
        # Whoever looks through all modules asks for names of this kind, and shall not cause an import.
        if "__all__" not in names and (not name.startswith("__") or name in ("__all__", "__version__")):
            with without_collections():
                module = importlib.import_module(others)
            for each in ("__all__", *module.__all__):
                if each not in names and hasattr(module, each):
                    names[each] = getattr(module, each)
        if name not in names:
            text = f"module {names['__name__']!r} has no attribute {name!r}"
            raise AttributeError(text, name=name, obj=sys.modules[names["__name__"]])
        return names[name]

    def list_names() -> list[str]:
        # Not what the package itself imports.
        special = [name for name in names if name.startswith("__")]
        return sorted({*special, *modules, *places, *load("__all__")})

    return load, list_names


@contextmanager
def without_collections() -> Iterator[None]:
    """Switch Python's garbage collection off for the block.

    Imports make objects that stay, and each full collection visits all objects of torch too: 60 ms and more. They count
    as old after the block, or the first collection after it would take as long.
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
