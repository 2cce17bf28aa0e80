"""Functions and classes travel by name; how people read it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

from hvlike.errors import RpcError, UsageError

_known: dict[Any, Any] = {}
"""Functions of the module torch that were asked for, and how they travel."""

_find_operator: Callable[[Any], str | None] = getattr(torch.jit._builtins, "_find_builtin", lambda func: None)


def reduce_builtin(function: BuiltinFunctionType) -> Any:
    """Return how a function written in C travels; NotImplemented: as pickle has it.

    Those of torch (torch.add) are methods of a hidden class, which takes pickle three names.
    """
    reduced = _known.get(function)
    if reduced is not None:
        return reduced
    if function.__module__ == "torch" and getattr(torch, function.__name__, None) is function:
        return _known.setdefault(function, (_torch_function, (function.__name__,)))
    return NotImplemented


def _torch_function(name: str) -> Any:
    try:
        return getattr(torch, name)
    except AttributeError as error:
        raise missing_name(error) from error


def name_of(func: Any) -> str:
    """A function as reports, drawings and profiles call it: operators of torch by their names there (aten::mul)."""
    return str(_find_operator(func) or getattr(func, "__qualname__", type(func).__qualname__))


def described(about: object) -> str:
    """What a message is about, in words: it is given as such, or as the function that is called or answered."""
    return about if isinstance(about, str) else name_of(about)


def missing_name(error: AttributeError | ImportError) -> RuntimeError:
    """What to raise where a name that came does not exist on this worker."""
    return RpcError(
        f"{error}. The RPC pickler does not serialize code of functions and classes, only their names: define them "
        f"under the same name in the same module on both workers."
    )


def cloud_pickler(*args: Any, **options: Any) -> Any:
    """Return a pickler of the package cloudpickle, which sends by value what has no name: lambdas, local functions.

    Raises: UsageError if it is not installed.
    """
    try:
        cloudpickle = import_module("cloudpickle")
    except ModuleNotFoundError:
        raise UsageError(
            "RpcBackendOptions(cloudpickle=True) needs the package cloudpickle on every rank: pip install cloudpickle."
        ) from None
    pickler = cloudpickle.Pickler(*args, **options)
    theirs = pickler.reducer_override
    pickler.reducer_override = lambda obj: obj.__qualname__ if _is_of_program(obj) else theirs(obj)
    return pickler


def _is_of_program(obj: Any) -> bool:
    """Whether it is a function or class that the program itself gives a name.

    cloudpickle would send a copy of it. Every rank runs the same program: its own function has its global variables,
    and an instance of a copied class would not be an instance of its own.
    """
    if not isinstance(obj, FunctionType | type) or obj.__module__ != "__main__":
        return False
    found: Any = sys.modules["__main__"]
    for name in obj.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is obj
