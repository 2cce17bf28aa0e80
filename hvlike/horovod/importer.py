"""The importer of Horovod's modules: each is made of hvlike's own objects, as table.py says."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType

from hvlike.config import HOROVODS_OWN
from hvlike.errors import StateError
from hvlike.horovod.table import MODULES, REFUSED


def install() -> None:
    """Have `import horovod.torch`, and Horovod's other modules for PyTorch, find hvlike. Local; does not block.

    Every rank calls it, before it imports horovod and before init(). It sets HVLIKE_GRADIENTS=horovod unless the
    environment has that variable: programs keep the gradients that they were written with. A second call does nothing.

    Raises:
        StateError: If hvlike is running, or Horovod itself is imported already.

    Example:
        >>> import hvlike.horovod
        >>> hvlike.horovod.install()
        >>> import horovod.torch as hvd
    """
    if any(isinstance(each, HorovodImporter) for each in sys.meta_path):
        return
    from hvlike.collectives.session.context import is_running

    if is_running() or "horovod" in sys.modules:
        what = "hvlike is running" if is_running() else "Horovod itself is imported"
        raise StateError(f"hvlike.horovod.install(): {what} already. Call it at the top of the program.")
    os.environ.setdefault("HVLIKE_GRADIENTS", HOROVODS_OWN)
    sys.meta_path.insert(0, HorovodImporter())


class HorovodImporter(MetaPathFinder, Loader):
    """Finds and fills the modules of the table, and refuses the rest of Horovod."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != "horovod":
            return None
        if fullname not in MODULES:
            raise ModuleNotFoundError(_refusal(fullname), name=fullname)
        return spec_from_loader(fullname, self, origin="hvlike", is_package=bool(_children(fullname)))

    def create_module(self, spec: ModuleSpec) -> None:
        """None: an ordinary module."""

    def exec_module(self, module: ModuleType) -> None:
        for place, names in MODULES[module.__name__].items():
            source = import_module(place)
            for name in names.split():
                setattr(module, name, getattr(source, name))
        # As with Horovod, `import horovod` alone loads nothing of a framework; horovod.torch brings what is inside.
        for child in _children(module.__name__):
            if child not in ("horovod.torch", "horovod.common"):
                import_module(child)


def _children(name: str) -> list[str]:
    return [each for each in MODULES if each.rpartition(".")[0] == name]


def _refusal(name: str) -> str:
    part = name.split(".")[1]
    served = ", ".join(each for each in MODULES if each.count(".") == 1)
    return f"hvlike stands in for Horovod here and has no {name!r}; it serves {served}. {REFUSED.get(part, '')}".strip()
