"""How functions, storages and tensors travel: what each leaves in the pickle stream, and what goes beside it.

Functions and classes travel by name; tensors go out of band.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from importlib import import_module
from types import FunctionType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from hvlike.errors import UsageError
from hvlike.rpc.wire.devices import target_device
from hvlike.rpc.wire.tensors import NAMES, PARAMETER, REQUIRES_GRAD, SPARSE_LAYOUTS, SPARSE_PART, split_sparse

if TYPE_CHECKING:
    from hvlike.rpc.wire.pickler import MessagePickler

# Stands for "the next buffer" in the stream. Writable: for read-only memory pickle adds an opcode.
THE_TENSOR = pickle.PickleBuffer(bytearray(1))
_find_operator: Callable[[Any], str | None] = getattr(torch.jit._builtins, "_find_builtin", lambda func: None)


def function_name(func: Any) -> str:
    """Return the name of a function in reports and profiles; torch's operators by their own names (aten::mul)."""
    return str(_find_operator(func) or getattr(func, "__qualname__", type(func).__qualname__))


def describe_subject(about: object) -> str:
    """Return what a message is about: `about` itself if it is a str, else the name of that function."""
    return about if isinstance(about, str) else function_name(about)


def cloud_pickler(*args: Any, **options: Any) -> Any:
    """Return a pickler of the package cloudpickle, which sends lambdas and local functions by value."""
    try:
        cloudpickle = import_module("cloudpickle")
    except ModuleNotFoundError:
        raise UsageError(
            "RpcBackendOptions(cloudpickle=True) needs the package cloudpickle on every rank: pip install cloudpickle."
        ) from None
    pickler = cloudpickle.Pickler(*args, **options)
    theirs = pickler.reducer_override
    pickler.reducer_override = lambda obj: obj.__qualname__ if _has_name_in_main(obj) else theirs(obj)
    return pickler


def _has_name_in_main(obj: Any) -> bool:
    """True for a function or class that the running program defines under a name.

    cloudpickle would send a copy. Every rank runs the same program: its own function uses its own global variables, and
    an instance of a copied class would not be an instance of its own class.
    """
    if not isinstance(obj, FunctionType | type) or obj.__module__ != "__main__":
        return False
    found: Any = sys.modules["__main__"]
    for name in obj.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is obj


def arrived(obj: Any) -> Any:
    return obj


def reduce_tensor(pickler: MessagePickler, tensor: Tensor) -> Any:
    """A tensor that is no instance of a subclass."""
    if tensor.layout is torch.strided:
        if tensor.dtype not in NAMES or tensor.is_nested or tensor.is_meta:
            return NotImplemented
        if tensor.is_cpu:
            pickler.items.append((tensor, 0))
        else:
            _add(pickler, tensor, 0)
    elif tensor.layout in SPARSE_LAYOUTS and tensor.dtype in NAMES and not tensor.is_meta:
        parts, row = split_sparse(tensor)
        for part in parts:
            _add(pickler, part, SPARSE_PART)
        pickler.ahead[len(pickler.items)] = row
        pickler.originals[len(pickler.items)] = tensor
        pickler.items.append(None)
    else:
        return NotImplemented
    return arrived, (THE_TENSOR,)


def _add(pickler: MessagePickler, tensor: Tensor, flags: int) -> None:
    """Let a dense tensor travel; a GPU tensor as a copy in host memory, with the device it goes to."""
    if not tensor.is_cpu:
        place, outgoing = len(pickler.items), pickler.outgoing
        pickler.targets[place] = str(target_device(tensor, outgoing.device_map, outgoing.what))
        if not flags & SPARSE_PART:
            pickler.originals[place] = tensor
        if tensor.requires_grad:
            flags |= REQUIRES_GRAD
        # Waits for the device. Strides stay where they leave no gaps.
        tensor = tensor.detach().to("cpu")
    pickler.items.append((tensor, flags))


def _reduce_parameter(pickler: MessagePickler, parameter: Parameter) -> Any:
    """A parameter, with the attributes that the program has set on it."""
    if parameter.layout is not torch.strided:
        return NotImplemented
    reduced = reduce_tensor(pickler, parameter)
    if reduced is NotImplemented:
        return NotImplemented
    stand_in, flags = cast("tuple[Tensor, int]", pickler.items[-1])
    pickler.items[-1] = (parameter if parameter.is_cpu else stand_in, flags | PARAMETER)
    state = parameter.__dict__
    return (*reduced, state, None, None, _set_attributes) if state else reduced


def _set_attributes(obj: Any, state: dict[str, Any]) -> None:
    vars(obj).update(state)


def _reduce_storage(_: MessagePickler, storage: torch.UntypedStorage) -> Any:
    """The memory of a tensor that reduces itself: an instance of a subclass, or a quantized one."""
    if storage.device.type != "cpu":
        return NotImplemented
    return torch.Tensor.untyped_storage, (torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage),)


def _reduce_typed_storage(_: MessagePickler, storage: torch.TypedStorage) -> Any:
    return _typed_storage, (storage._untyped_storage, storage.dtype)


def _typed_storage(untyped: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    make: Callable[..., torch.TypedStorage] = torch.TypedStorage
    return make(wrap_storage=untyped, dtype=dtype, _internal=True)


REDUCERS: dict[type, Callable[[MessagePickler, Any], Any]] = {
    Tensor: reduce_tensor,
    Parameter: _reduce_parameter,
    torch.UntypedStorage: _reduce_storage,
    torch.TypedStorage: _reduce_typed_storage,
}
"""How objects of exactly these classes travel; pickle handles all others. NotImplemented: pickle handles this one."""
