"""python -m hvlike horovod [-m MODULE | SCRIPT] ...: run a program in which nothing was changed.

A process that multiprocessing spawns there imports this file as its main module: the program again, after horovod.
"""

from __future__ import annotations

import os
import runpy
import sys
from importlib.machinery import ModuleSpec

from hvlike.errors import UsageError
from hvlike.horovod.importer import install
from hvlike.transport.host.main_program import find_program, run_program

_PROGRAM = "HVLIKE_HOROVOD_PROGRAM"  # The path of its file, or -m and its module
_USAGE = """usage: mpirun -n 4 python -m hvlike horovod [-m MODULE | SCRIPT] [ARGUMENT ...]

Runs a program for Horovod with PyTorch; what it imports of horovod is hvlike. Its gradients are Horovod's unless
HVLIKE_GRADIENTS=adjoint is set."""


def main(arguments: list[str]) -> int:
    """Run the program; returns its exit status."""
    is_asked = arguments[:1] in (["-h"], ["--help"])
    if is_asked or not arguments:
        print(_USAGE, file=sys.stdout if is_asked else sys.stderr)
        return 0 if is_asked else 2
    install()
    try:
        program = find_program(arguments)
    except UsageError as error:
        print(f"python -m hvlike horovod: {error}", file=sys.stderr)
        return 2
    os.environ[_PROGRAM] = program.name
    return run_program(program, _MainSpec(program.package))


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
