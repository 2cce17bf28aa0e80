"""Modules that come when they are used: importing them takes longer than importing all else that a job needs.

Imported before torch, by sitecustomize in the processes of jobs and by conftest where there are many ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType, SimpleNamespace
from typing import Any

COMPILER = "torch._dynamo"
KERNELS = ("torch._meta_registrations", "torch.distributed._meta_registrations")
# What torch's compiler and its exporter need, and next to no program else: most of what importing torch takes.
OF_TORCH = (*KERNELS, "torch.export", COMPILER)
# The examples need nothing of it but the digits.
OF_SKLEARN = ("sklearn", "sklearn.datasets")
LATE = (*OF_TORCH, *OF_SKLEARN)


class Late(ModuleType):
    """Stands for a module until it is used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(import_late(self.__name__), name)


class NoCompiler(Late):
    """The first optimizer of a program imports the compiler only to say that its functions shall not be compiled."""

    def disable(self, function: Any = None, recursive: bool = True, **more: Any) -> Any:
        return function if function is not None else lambda each: each

    def graph_break(self) -> None:
        pass


class NoKernels(Late):
    """What importing the kernels does besides for all programs: in torch 2.13 generators have a class of their own."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        core = sys.modules["torch._C"]
        if hasattr(core, "_set_generator_metaclass"):
            core._set_generator_metaclass(import_module("torch._opaque_base").OpaqueBaseMeta)
        # torch.testing would import DTensors at its first comparison, to see that it compares none.
        vars(sys.modules["torch.testing._comparison"])["_HAS_DTENSOR"] = False


class OnlyDigits(Late):
    """Of scikit-learn's data sets."""

    def load_digits(self) -> Any:
        import numpy

        (folder,) = find_real(self.__name__).submodule_search_locations
        rows = numpy.loadtxt(f"{folder}/data/digits.csv.gz", delimiter=",")
        data = rows[:, :-1]
        return SimpleNamespace(data=data, images=data.reshape(-1, 8, 8), target=rows[:, -1].astype(int))


STAND_INS: dict[str, type[Late]] = {COMPILER: NoCompiler, KERNELS[0]: NoKernels, "sklearn.datasets": OnlyDigits}


class Finder:
    """Finds what comes late, and what of it somebody imports by name."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if name in brought:
            return None
        if name in LATE and find_real(name):
            return ModuleSpec(name, Loader(STAND_INS.get(name, Late)(name)), is_package=True)
        parent = name.rpartition(".")[0]
        if parent not in LATE:
            return None
        found = PathFinder.find_spec(name, import_late(parent).__path__)
        return ModuleSpec(name, Loader(sys.modules[name])) if name in sys.modules else found


class Loader:
    """Gives a module that is there already."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        pass


def find_real(name: str) -> Any:
    """Where it is; None: not installed."""
    parent, _, _ = name.rpartition(".")
    path = find_real(parent).submodule_search_locations if parent in OF_SKLEARN else None
    return PathFinder.find_spec(name, path or getattr(sys.modules.get(parent), "__path__", None))


def import_late(wanted: str) -> ModuleType:
    """The real one; who compiles or exports needs the kernels too."""
    first = KERNELS if wanted in OF_TORCH else OF_SKLEARN[:1]
    for name in (*first, wanted):
        brought.add(name)
        if isinstance(sys.modules.get(name), Late):
            del sys.modules[name]
    for name in first:
        import_module(name)
    return import_module(wanted)


# Those that are the real ones.
brought: set[str] = set()


def install() -> None:
    """From now on."""
    sys.meta_path.insert(0, Finder)
