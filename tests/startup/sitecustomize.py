"""Python runs this first in the processes of jobs, which spend most of their time on imports."""

from __future__ import annotations

import atexit
import gc
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

COMPILER = "torch._dynamo"


class NoCompiler(ModuleType):
    """Stands for torch's compiler, which takes as long to import as torch itself, until it is used.

    The first optimizer of a program imports it, only to say that its functions shall not be compiled.
    """

    def disable(self, function: Any = None, recursive: bool = True, **more: Any) -> Any:
        return function if function is not None else lambda each: each

    def graph_break(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(import_compiler(), name)


class Finder:
    """Finds the compiler, and what of it somebody imports by name."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name == COMPILER:
            return ModuleSpec(name, Loader(NoCompiler(name)), is_package=True)
        if not name.startswith(f"{COMPILER}."):
            return None
        found = PathFinder.find_spec(name, import_compiler().__path__)
        return ModuleSpec(name, Loader(sys.modules[name])) if name in sys.modules else found


class Loader:
    """Gives a module that is there already."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        pass


def import_compiler() -> ModuleType:
    """The real one."""
    if isinstance(sys.modules.get(COMPILER), NoCompiler):
        sys.meta_path.remove(Finder)
        del sys.modules[COMPILER]
    return import_module(COMPILER)


# Collecting garbage while torch is imported takes a tenth of that.
gc.set_threshold(10_000, 10, 10)
# Looking through all of torch for garbage at the end of a process takes a quarter of its life.
atexit.register(gc.freeze)
sys.meta_path.insert(0, Finder)
