"""How functions, storages and tensors travel: what each leaves in the pickle stream, and what goes beside it.

Functions and classes travel by name; tensors go out of band.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from importlib import import_module
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from hvlike.errors import RpcError, UsageError
from hvlike.rpc.wire import tensors
from hvlike.rpc.wire.devices import target_device, to_host
from hvlike.rpc.wire.tensors import NAMES, PARAMETER, REQUIRES_GRAD, SPARSE_PART

if TYPE_CHECKING:
    from hvlike.rpc.wire.pickler import MessagePickler


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


def function_name(func: Any) -> str:
    """A function as reports, drawings and profiles call it: operators of torch by their names there (aten::mul)."""
    return str(_find_operator(func) or getattr(func, "__qualname__", type(func).__qualname__))


def describe_subject(about: object) -> str:
    """What a message is about, in words: it is given as such, or as the function that is called or answered."""
    return about if isinstance(about, str) else function_name(about)


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


def reduce_storage(storage: torch.UntypedStorage) -> Any:
    """The memory of a tensor that reduces itself: an instance of a subclass, or a quantized one."""
    if storage.device.type != "cpu":
        return NotImplemented
    return torch.Tensor.untyped_storage, (torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage),)


def reduce_typed_storage(storage: torch.TypedStorage) -> Any:
    """The same in the form that knows its dtype."""
    return _typed_storage, (storage._untyped_storage, storage.dtype)


def _typed_storage(untyped: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    make: Callable[..., torch.TypedStorage] = torch.TypedStorage
    return make(wrap_storage=untyped, dtype=dtype, _internal=True)


THE_TENSOR = pickle.PickleBuffer(bytearray(1))
"""Stands for "the next buffer" in the stream. Writable, or pickle would add an opcode that asks for real memory."""


def arrived(obj: Any) -> Any:
    """The object that the stream took from the buffers."""
    return obj


def reduce_tensor(walk: MessagePickler, tensor: Tensor) -> Any:
    """A tensor of no subclass."""
    if tensor.dtype not in NAMES or tensor.is_nested or tensor.is_meta:
        return NotImplemented
    if tensor.layout is torch.strided:
        _add(walk, tensor, 0)
    elif tensor.layout in tensors.SPARSE_LAYOUTS:
        parts, row = tensors.split_sparse(tensor)
        for part in parts:
            _add(walk, part, SPARSE_PART)
        walk.ahead[len(walk.items)] = row
        walk.originals[len(walk.items)] = tensor
        walk.items.append(None)
    else:
        return NotImplemented
    return arrived, (THE_TENSOR,)


def _add(walk: MessagePickler, tensor: Tensor, flags: int) -> None:
    """Let a dense tensor travel; one of a GPU as a copy in host memory that knows where it goes."""
    if not tensor.is_cpu:
        place = len(walk.items)
        walk.targets[place] = str(target_device(tensor, walk.outgoing.device_map, walk.outgoing.what))
        if not flags & SPARSE_PART:
            walk.originals[place] = tensor
        flags |= REQUIRES_GRAD if tensor.requires_grad else 0
        tensor = to_host(tensor)
    walk.items.append((tensor, flags))


def reduce_parameter(walk: MessagePickler, parameter: Parameter) -> Any:
    """A parameter, with the attributes it was given."""
    if parameter.layout is not torch.strided:
        return NotImplemented
    reduced = reduce_tensor(walk, parameter)
    if reduced is NotImplemented or reduced[0] is not arrived:
        return NotImplemented
    stand_in, flags = cast("tuple[Tensor, int]", walk.items[-1])
    walk.items[-1] = (parameter if parameter.is_cpu else stand_in, flags | PARAMETER)
    state = parameter.__dict__
    return (*reduced, state, None, None, _set_attributes) if state else reduced


def _set_attributes(obj: Any, state: dict[str, Any]) -> None:
    vars(obj).update(state)


REDUCERS: dict[type, Callable[[MessagePickler, Any], Any]] = {
    Tensor: reduce_tensor,
    Parameter: reduce_parameter,
    torch.UntypedStorage: lambda walk, storage: reduce_storage(storage),
    torch.TypedStorage: lambda walk, storage: reduce_typed_storage(storage),
    BuiltinFunctionType: lambda walk, function: reduce_builtin(function),
}
"""How objects of these very classes travel; all others as pickle has it."""
