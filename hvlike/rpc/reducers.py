"""How tensors, storages and functions travel: what each leaves in the stream, and what goes beside it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from types import BuiltinFunctionType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from hvlike.rpc import sparse
from hvlike.rpc.callables import reduce_builtin
from hvlike.rpc.devices.travelling import on_host, target_of
from hvlike.rpc.storages import reduce_storage, reduce_typed_storage
from hvlike.rpc.tensors import GRADED, NAMES, PARAMETER, PART

if TYPE_CHECKING:
    from hvlike.rpc.pickler import Walk

THE_TENSOR = pickle.PickleBuffer(bytearray(1))
"""Stands for "the next buffer" in the stream. Writable, or pickle would add an opcode that asks for real memory."""


def arrived(obj: Any) -> Any:
    """The object that the stream took from the buffers."""
    return obj


def reduce_tensor(walk: Walk, tensor: Tensor) -> Any:
    """A tensor of no subclass."""
    if tensor.dtype not in NAMES or tensor.is_nested or tensor.is_meta:
        return NotImplemented
    if tensor.layout is torch.strided:
        _add(walk, tensor, 0)
    elif tensor.layout in sparse.LAYOUTS:
        parts, row = sparse.take_apart(tensor)
        for part in parts:
            _add(walk, part, PART)
        walk.ahead[len(walk.items)] = row
        walk.originals[len(walk.items)] = tensor
        walk.items.append(None)
    else:
        return NotImplemented
    return arrived, (THE_TENSOR,)


def _add(walk: Walk, tensor: Tensor, flags: int) -> None:
    """Let a dense tensor travel; one of a GPU as a copy in host memory that knows where it goes."""
    if not tensor.is_cpu:
        place = len(walk.items)
        walk.targets[place] = str(target_of(tensor, walk.outgoing.device_map, walk.outgoing.what))
        if not flags & PART:
            walk.originals[place] = tensor
        flags |= GRADED if tensor.requires_grad else 0
        tensor = on_host(tensor)
    walk.items.append((tensor, flags))


def reduce_parameter(walk: Walk, parameter: Parameter) -> Any:
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


REDUCERS: dict[type, Callable[[Walk, Any], Any]] = {
    Tensor: reduce_tensor,
    Parameter: reduce_parameter,
    torch.UntypedStorage: lambda walk, storage: reduce_storage(storage),
    torch.TypedStorage: lambda walk, storage: reduce_typed_storage(storage),
    BuiltinFunctionType: lambda walk, function: reduce_builtin(function),
}
"""How objects of these very classes travel; all others as pickle has it."""
