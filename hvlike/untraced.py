"""Keeping torch.compile out of hvlike: what exchanges data between processes and counts its calls runs as it is.

    a call in a compiled function    ends a graph: the function is run as it is, and the next graph begins after it
    a hook, a callback of autograd   is run as it is, with all that it calls
    with fullgraph=True              torch refuses the call, with `REASON`

torch.compiler.disable puts a function around each, which costs 2 us a call and loads the compiler, for seconds. This
tells the compiler the same beforehand, by an attribute and a mark on the code, and costs nothing where none is in use.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, TypeVar

import torch

T = TypeVar("T")
REASON = (
    "hvlike exchanges data with other processes, which no graph can hold: call it outside of the compiled function, or "
    "leave out fullgraph=True"
)
_HOUSE = str(Path(__file__).parent)
_TRACED = "_hvlike_traced"


def traced(function: T) -> T:
    """Leave a method of a public class to the compiler: what it calls of hvlike is untraced by itself. A decorator."""
    setattr(function, _TRACED, True)
    return function


def untraced(target: T) -> T:
    """Have torch.compile run a function, or all methods of a class, and what they call, as they are. A decorator."""
    for function in _functions_of(target):
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        function._torchdynamo_disable_msg = REASON  # type: ignore[attr-defined]
        for code in _codes_of(function.__code__):
            _skip(code)
            _marked.add(code)
    return target


def keep_untraced(public: Mapping[str, Any]) -> None:
    """The functions of a public module, and what its classes have of methods that a program may call."""
    for name in public["__all__"]:
        # Modules and classes that are imported at their first use are not there yet.
        target = public.get(name)
        if isinstance(target, type):
            for kind in target.__mro__:
                if _is_ours(kind) and not issubclass(kind, (BaseException, enum.Enum)):
                    untraced(_Public(kind))
        elif isinstance(target, FunctionType) and _is_ours(target):
            untraced(target)


class _Public:
    """The methods of a class without those whose names begin with one underscore."""

    def __init__(self, kind: type) -> None:
        members = vars(kind).items()
        self.members = [each for name, each in members if not name.startswith("_") or name.startswith("__")]


def is_untraced(code: CodeType) -> bool:
    """Whether the compiler runs this code as it is."""
    return code in _marked


def _is_ours(target: type | FunctionType) -> bool:
    return target.__module__.partition(".")[0] == __name__.partition(".")[0]


def _functions_of(target: Any) -> Iterator[FunctionType]:
    if isinstance(target, FunctionType):
        if not hasattr(target, _TRACED):
            yield target
            yield from _functions_of(getattr(target, "__wrapped__", None))
    elif isinstance(target, (staticmethod, classmethod)):
        yield from _functions_of(target.__func__)
    elif isinstance(target, property):
        for each in (target.fget, target.fset, target.fdel):
            yield from _functions_of(each)
    elif isinstance(target, (type, _Public)):
        for each in vars(target).values() if isinstance(target, type) else target.members:
            if not isinstance(each, type):
                yield from _functions_of(each)


def _codes_of(code: CodeType) -> Iterator[CodeType]:
    """The code of a function and of those defined in it; that of a decorator of others belongs to these, too."""
    if code.co_filename.startswith(_HOUSE):
        yield code
        for each in code.co_consts:
            if isinstance(each, CodeType):
                yield from _codes_of(each)


def _find_skip() -> Callable[[CodeType], object]:
    dynamo: Any = torch._C._dynamo.eval_frame
    if not hasattr(dynamo, "set_code_exec_strategy"):  # torch before 2.7
        skip_code: Callable[[CodeType], object] = dynamo.skip_code
        return skip_code
    skip = dynamo._FrameAction.SKIP
    strategy = dynamo._FrameExecStrategy(skip, skip)
    return lambda code: dynamo.set_code_exec_strategy(code, strategy)


_skip = _find_skip()
_marked: set[CodeType] = set()
