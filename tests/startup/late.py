"""Modules that come when they are used: importing them takes longer than importing all else that a job needs.

Imported before torch, by sitecustomize in the processes of jobs and by conftest where there are many ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import abc, import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType, SimpleNamespace
from typing import Any

COMPILER = "torch._dynamo"
KERNELS = ("torch._meta_registrations", "torch.distributed._meta_registrations")
TRANSFORMS = "torch.func"
HIGHER_ORDER = "torch._higher_order_ops"
SUBGRAPHS = f"{HIGHER_ORDER}.invoke_subgraph"
# In the order in which torch imports them, and what may only be imported after them: they need each other.
KINDS_OF_MODELS = ("torchgen.model", "torch.distributions", "torch.nested", "torch.nn.intrinsic", "torch.nn.qat")
KINDS_OF_MODELS += ("torch.nn.quantizable", "torch.nn.quantized", "torch.quantization", "torch.masked", TRANSFORMS)
KINDS_OF_MODELS += (HIGHER_ORDER, SUBGRAPHS, "torch.fx.passes", "torch.fx.experimental.proxy_tensor")
# What torch's compiler and its exporter need, and next to no program else: most of what importing torch takes.
OF_TORCH = (*KINDS_OF_MODELS, *KERNELS, "torch.export", COMPILER)
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


class NoTransforms(Late):
    """torch has one of them among its own names."""

    def vmap(self, *arguments: Any, **more: Any) -> Any:
        return import_late(self.__name__).vmap(*arguments, **more)


class NoHigherOrder(Late):
    """torch has two of them among its own names."""

    def cond(self, *arguments: Any, **more: Any) -> Any:
        return import_late(self.__name__).cond(*arguments, **more)

    def while_loop(self, *arguments: Any, **more: Any) -> Any:
        return import_late(self.__name__).while_loop(*arguments, **more)


class NoSubgraphs(Late):
    """torch.compiler has one of its types in an annotation."""

    NestedCompileRegionOptions = object


class OnlyDigits(Late):
    """Of scikit-learn's data sets."""

    def load_digits(self) -> Any:
        import numpy

        (folder,) = find_real(self.__name__).submodule_search_locations
        rows = numpy.loadtxt(f"{folder}/data/digits.csv.gz", delimiter=",")
        data = rows[:, :-1]
        return SimpleNamespace(data=data, images=data.reshape(-1, 8, 8), target=rows[:, -1].astype(int))


STAND_INS: dict[str, type[Late]] = {COMPILER: NoCompiler, KERNELS[0]: NoKernels, "sklearn.datasets": OnlyDigits}
STAND_INS |= {TRANSFORMS: NoTransforms, HIGHER_ORDER: NoHigherOrder, SUBGRAPHS: NoSubgraphs}


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


class Loader(abc.Loader):
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
    path = find_real(parent).submodule_search_locations if parent in LATE else None
    return PathFinder.find_spec(name, path or getattr(sys.modules.get(parent), "__path__", None))


def import_late(wanted: str) -> ModuleType:
    """The real one; with it what others expect to be there before, in torch's order."""
    if wanted in brought:
        return import_module(wanted)
    first = OF_SKLEARN[:1] if wanted in OF_SKLEARN else KINDS_OF_MODELS
    if wanted not in (*OF_SKLEARN, *KINDS_OF_MODELS):
        # Who compiles or exports needs the kernels too.
        first += KERNELS
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
