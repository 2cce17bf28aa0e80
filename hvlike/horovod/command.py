"""python -m hvlike horovod [-m MODULE | SCRIPT] ...: run a program in which nothing was changed.

A process that multiprocessing spawns there imports this file as its main module: the program again, after horovod.
"""

from __future__ import annotations

import io
import os
import runpy
import sys
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, ModuleType

from hvlike.errors import UsageError
from hvlike.horovod.importer import install

_PROGRAM = "HVLIKE_HOROVOD_PROGRAM"  # The path of its file, or -m and its module
_USAGE = """usage: mpirun -n 4 python -m hvlike horovod [-m MODULE | SCRIPT] [ARGUMENT ...]

Runs a program for Horovod with PyTorch; what it imports of horovod is hvlike. Its gradients are Horovod's unless
HVLIKE_GRADIENTS=adjoint is set."""


def main(arguments: list[str]) -> int:
    """Run the program; returns 0 if it comes to its end."""
    is_asked = arguments[:1] in (["-h"], ["--help"])
    if is_asked or not arguments or arguments == ["-m"]:
        print(_USAGE, file=sys.stdout if is_asked else sys.stderr)
        return 0 if is_asked else 2
    install()
    if arguments[0] == "-m":
        _run(*_module(arguments[1]), arguments[1:])
    else:
        _run(*_script(arguments[0]), arguments)
    return 0


def _script(path: str) -> tuple[CodeType, str, str | None]:
    """The code of a program, its file, and the package that it is in."""
    sys.path[0] = os.path.dirname(os.path.abspath(path))
    os.environ[_PROGRAM] = os.path.abspath(path)
    with io.open_code(path) as file:
        return compile(file.read(), path, "exec"), os.path.abspath(path), None


def _module(name: str) -> tuple[CodeType, str, str | None]:
    spec = find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name = f"{name}.__main__"
        spec = find_spec(name)
    os.environ[_PROGRAM] = f"-m {name}"
    code = spec.loader.get_code(name) if spec is not None and isinstance(spec.loader, InspectLoader) else None
    if spec is None or spec.origin is None or code is None:
        raise UsageError(f"python -m hvlike horovod -m {name}: there is no such module, or it is no program in Python.")
    return code, spec.origin, spec.parent


def _run(code: CodeType, file: str, package: str | None, arguments: list[str]) -> None:
    program = ModuleType("__main__")
    program.__spec__ = _MainSpec(package)
    program.__package__ = package
    program.__file__ = file
    sys.argv = [file, *arguments[1:]] if package is not None else arguments
    sys.modules["__main__"] = program
    exec(code, program.__dict__)


class _MainSpec(ModuleSpec):
    """Has processes that multiprocessing spawns import this file as their main module: they need horovod before all."""

    def __init__(self, package: str | None) -> None:
        super().__init__(__name__, None)
        self._package = package

    @property
    def parent(self) -> str | None:
        """Where relative imports of the program begin."""
        return self._package


if __name__ == "__mp_main__":
    install()
    program = os.environ[_PROGRAM]
    run = runpy.run_module if program.startswith("-m ") else runpy.run_path
    globals().update(run(program.removeprefix("-m "), run_name=__name__))
