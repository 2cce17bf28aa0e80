"""python -m hvlike horovod [-m MODULE | SCRIPT] ...: run a program in which nothing was changed."""

from __future__ import annotations

import io
import os
import runpy
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

from hvlike.horovod import spawned
from hvlike.horovod.importer import install

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
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        _run_script(arguments)
    return 0


def _run_script(arguments: list[str]) -> None:
    script = arguments[0]
    with io.open_code(script) as file:
        code = compile(file.read(), script, "exec")
    program = ModuleType("__main__")
    # A process that multiprocessing spawns imports the main module by this name: it needs horovod before the program.
    program.__spec__ = ModuleSpec(spawned.__name__, None)
    program.__file__ = os.path.abspath(script)
    os.environ[spawned.PROGRAM] = program.__file__
    sys.argv = arguments
    sys.path[0] = os.path.dirname(program.__file__)
    sys.modules["__main__"] = program
    exec(code, program.__dict__)
