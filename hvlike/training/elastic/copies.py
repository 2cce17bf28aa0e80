"""Copies of state dicts into memory that is kept: new memory costs several times as much as the copy itself."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

_UNCHANGING = (bool, int, float, complex, str, bytes, type(None))


def copy_into(kept: Any, state: Any) -> Any:
    """Return a copy of a state dict that shares nothing with it; tensors go into those of an earlier copy. Local.

    The copy is as deepcopy would make it, on the same devices. Whoever loads it must copy it again: optimizers keep
    the tensors they are given, and the next copy would change those.

    Args:
        kept: An earlier copy that is given up, or None. Its tensors of fitting dtype, shape and device are written to.
        state: Tensors and plain values in dicts, lists and tuples; all else is deep-copied.

    Returns:
        The copy.
    """
    copier = _Copier()
    # A tensor that was made in inference mode could not be written to outside of it.
    with torch.inference_mode(False), torch.no_grad():
        copy = copier.copied(kept, state)
        if copier.sources:
            torch._foreach_copy_(copier.targets, copier.sources)
    return copy


class _Copier:
    def __init__(self) -> None:
        self.sources: list[Tensor] = []
        self.targets: list[Tensor] = []
        self._known: dict[int, tuple[Tensor, Tensor]] = {}  # By address: tied weights are several tensors
        self._memo: dict[int, Any] = {}

    def copied(self, kept: Any, value: Any) -> Any:
        kind = type(value)
        if kind in _UNCHANGING:
            return value
        if isinstance(value, Tensor):
            return self._tensor(kept, value)
        if kind is dict or kind is OrderedDict:
            before = kept if type(kept) is kind else {}
            copy = kind((self.copied(None, key), self.copied(before.get(key), each)) for key, each in value.items())
            if kind is OrderedDict:
                # Modules keep their versions there.
                vars(copy).update(deepcopy(vars(value)))
            return copy
        if kind is list or kind is tuple:
            return kind(self._each(kept if type(kept) is kind else (), value))
        return deepcopy(value, self._memo)

    def _each(self, kept: Any, values: Any) -> Iterable[Any]:
        for place, each in enumerate(values):
            yield self.copied(kept[place] if place < len(kept) else None, each)

    def _tensor(self, kept: Any, value: Tensor) -> Tensor:
        plain = type(value) is Tensor and value.layout is torch.strided and not value.requires_grad
        if not plain or value.is_quantized or not value.numel():
            copy: Tensor = deepcopy(value, self._memo)
            return copy
        address = value.data_ptr()
        other, target = self._known.get(address, (None, None))
        if target is None or not _alike(other, value):
            target = kept if _fits(kept, value) else torch.empty_like(value)
            self._known[address] = value, target
            self.targets.append(target)
            self.sources.append(value)
        # Objects that are deep-copied may hold it too.
        self._memo[id(value)] = target
        return target


def _fits(kept: Any, value: Tensor) -> bool:
    # A copy has the strides of a dense tensor also where the original is none.
    return _alike(kept, value) or (not value.is_contiguous() and _alike(kept, torch.empty_like(value)))


def _alike(one: Any, other: Tensor) -> bool:
    return (
        type(one) is Tensor
        and one.dtype is other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.device == other.device
    )
