"""Whether a tensor has memory of its own, whose elements may be read and written at its address.

has it      plain tensors, parameters, buffers, views of them, subclasses that were made with as_subclass
has none    what stands for other tensors (DTensor, AsyncCollectiveTensor and all other wrappers, functional tensors,
            what vmap and grad hand to a function), what stands for none (meta, FakeTensor, zeros of forward AD,
            parameters and buffers of lazy modules before their first forward), nested tensors, and those whose memory
            was freed: the address is 0, or torch refuses to tell it
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from operator import is_
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from hvlike.errors import UsageError
from hvlike.observe.log import shown_rank

_address, _is_nested = torch.Tensor.data_ptr, torch.Tensor.is_nested.__get__  # type: ignore[attr-defined]
_without_overrides: Any = torch._C.DisableTorchFunctionSubclass
_ORDINARY = (torch.Tensor, torch.nn.Parameter)
_WITH_ADDRESSES = ("cpu", "cuda", "meta")

_FUNCTIONS = "call it outside of the transformed function"
_INITIALISED = "run one forward pass first, on every rank: then it has a shape"
_FIXES = {
    "DTensor": "pass its to_local(), the part of this rank, or its full_tensor()",
    "AsyncCollectiveTensor": "pass what its wait() returns",
    "FakeTensor": "call it outside of FakeTensorMode, of torch.export and of a compiler",
    "FunctionalTensor": "call it outside of a compiler",
    "NestedTensor": "pass its values(), or the tensors of unbind()",
}
_SHARDED = "fully_shard and tensor parallelism reduce its gradients themselves: train it with torch's plain optimizer"


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a dense tensor has memory of its own; True without elements, where nothing is read. 0.1 us."""
    try:
        if type(tensor) in _ORDINARY:
            if _address(tensor):
                return not _is_nested(tensor)
        else:
            # A subclass may answer for what it wraps.
            with _without_overrides():
                if _address(tensor):
                    return not _is_nested(tensor)
            if is_lazy(tensor):
                return False
        if tensor.device.type in _WITH_ADDRESSES and tensor.numel():
            return False
    except RuntimeError:
        if tensor.device.type in _WITH_ADDRESSES:
            return False
    return stand_in(tensor) is None


def stand_in(tensor: torch.Tensor) -> tuple[str, str] | None:
    """What a tensor of any layout is instead of one with elements, and what to pass in its place; None: it has them."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or torch._is_functional_tensor(tensor):
        return "one of torch.func (vmap, grad, jvp, functionalize)", _FUNCTIONS
    if is_lazy(tensor):
        return "one that is uninitialized, of a lazy module", _INITIALISED
    for each in type(tensor).__mro__[:-1]:
        if each.__name__ in _FIXES and each.__module__.startswith("torch."):
            return f"a {each.__name__}", _FIXES[each.__name__]
    if tensor.is_nested:
        return "a nested tensor", _FIXES["NestedTensor"]
    if tensor.is_meta:
        return "a meta tensor", "make it on a real device first, a module with to_empty()"
    if tensor._is_zerotensor():
        return "zeros without memory, as derivatives are", "pass its clone()"
    keys = torch._C._dispatch_keys(tensor)
    if keys.has(torch._C.DispatchKey.Python) and tensor.layout is torch.strided:
        with _without_overrides():
            if not _address(tensor):
                return f"a {type(tensor).__name__}, which wraps other tensors", "pass a plain tensor in its place"
    return None


def check_memory(what: str, tensor: torch.Tensor, error: type[UsageError] = UsageError) -> None:
    """Refuse a tensor without memory of its own; sparse ones as `first_without`. what: the call and the tensor."""
    if first_without((tensor,)) is not None:
        raise without_memory(what, tensor, error)


def check_stand_in(what: str, tensor: torch.Tensor, error: type[UsageError] = UsageError) -> None:
    """Refuse what stands for other tensors or none, of any layout; memory may be freed. Raises: `error`."""
    if stand_in(tensor) is not None:
        raise without_memory(what, tensor, error)


def check_parameter(what: str, parameter: torch.Tensor) -> None:
    """Refuse a parameter that stands for others or none; it may be freed. what: who trains it. Raises: UsageError."""
    if stand_in(parameter) is not None:
        raise without_memory(what, parameter, sharded=_SHARDED)


def check_gradients(tensors: Sequence[torch.Tensor], name_of: Callable[[int], str]) -> None:
    """Refuse wrappers, which a program may have put in place of gradients; no Python for each plain tensor."""
    if not all(map(is_, map(type, tensors), repeat(torch.Tensor))):
        for place, tensor in enumerate(tensors):
            if type(tensor) is not torch.Tensor:
                check_memory(f"gradient {name_of(place)!r}", tensor)


def first_without(tensors: Iterable[Any]) -> torch.Tensor | None:
    """The first tensor without memory of its own in lists of any depth; sparse ones only if they stand for others."""
    for each in tensors:
        if isinstance(each, torch.Tensor):
            # Sparse tensors have no address either.
            if not has_memory(each) and (each.layout is torch.strided or stand_in(each) is not None):
                return each
        elif each:
            found = first_without(each)
            if found is not None:
                return found
    return None


def without_memory(
    what: str, tensor: torch.Tensor, error: type[UsageError] = UsageError, *, sharded: str | None = None
) -> UsageError:
    """The error for such a tensor. sharded: the advice for a DTensor, where that is another one."""
    kind, fix = stand_in(tensor) or (
        "one whose memory was freed (resize_(0), as FSDP does)",
        "gather or restore it before",
    )
    if sharded is not None and fix is _FIXES["DTensor"]:
        fix = sharded
    try:
        shape = f" of shape {list(tensor.shape)}"
    except RuntimeError:
        shape = ""
    place = shown_rank()
    rank = "" if place is None else f"rank {place}: "
    return error(f"{rank}{what}: expected a tensor with memory of its own, got {kind}{shape}; {fix}.")
