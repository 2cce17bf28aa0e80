"""Running a program as Python does: `python train.py ARGUMENT ...` or `python -m module ...`, in this process."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import NamedTuple

from hvlike.errors import UsageError


class MainProgram(NamedTuple):
    """A program that was found and read."""

    compiled: Callable[[], CodeType]
    file: str
    arguments: Sequence[str]  # What sys.argv becomes
    spec: ModuleSpec | None  # Of a module; None for a file
    folder: str  # What Python has in the first place of sys.path

    @property
    def package(self) -> str | None:
        """The package that its relative imports begin in; None for a file."""
        return None if self.spec is None else self.spec.parent

    @property
    def name(self) -> str:
        """How to run it again: the path of its file, or -m and its module."""
        return self.file if self.spec is None else f"-m {self.spec.name}"


def find_program(arguments: Sequence[str]) -> MainProgram:
    """Find what a command line names, SCRIPT or -m MODULE, and its arguments.

    Raises: UsageError if there is no such program, in Python's words.
    """
    return _module(arguments) if arguments[0] == "-m" else _script(arguments)


def _script(arguments: Sequence[str]) -> MainProgram:
    path = os.path.abspath(arguments[0])
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        raise UsageError(f"can't open file {path!r}: {error.strerror}") from None
    return MainProgram(lambda: compile(source, path, "exec"), path, arguments, None, os.path.dirname(path))


def _module(arguments: Sequence[str]) -> MainProgram:
    if not arguments[1:]:
        raise UsageError("-m: the name of a module is missing")
    name = arguments[1]
    folder = os.getcwd()
    sys.path[0] = folder
    try:
        spec = find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        raise UsageError(f"-m {name}: {error}") from None
    loader = None if spec is None else spec.loader
    if spec is None or spec.origin is None or not isinstance(loader, InspectLoader):
        raise UsageError(f"-m {name}: there is no such module, or it is no program in Python")

    def compiled() -> CodeType:
        code = loader.get_code(spec.name)
        if code is None:
            raise UsageError(f"-m {name}: there is no such module, or it is no program in Python")
        return code

    return MainProgram(compiled, spec.origin, [spec.origin, *arguments[2:]], spec, folder)


def run_program(program: MainProgram, spec: ModuleSpec | None = None) -> int:
    """Run it as `__main__`; return the exit status: 1 after an exception, which is shown as Python shows it.

    spec: what `__main__` has as its spec; processes that multiprocessing spawns import that. Default: its own.
    """
    main = ModuleType("__main__")
    main.__spec__ = program.spec if spec is None else spec
    main.__package__ = program.package
    main.__file__ = program.file
    main.__builtins__ = __builtins__  # type: ignore[attr-defined]  # what exec gives a program anyway
    sys.path[0] = program.folder
    sys.argv = list(program.arguments)
    sys.modules["__main__"] = main
    try:
        exec(program.compiled(), main.__dict__)
    except Exception as error:
        # Without the frames of this file and those above, as if Python had started the program.
        trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 1
    return 0
