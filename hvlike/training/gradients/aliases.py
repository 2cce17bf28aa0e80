"""Parameters that lie in the same memory though they are different tensors, as `b.data = a.data` makes them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn.parameter import UninitializedParameter

from hvlike.transport.memory.own_memory import has_memory


def first_sharers(tensors: Sequence[Tensor]) -> list[int]:
    """For each tensor the place of the first one that its memory overlaps with, directly or through others; its own
    place where there is none.
    """
    pieces = sorted(
        (tensor.device.type, tensor.device.index or 0, tensor.data_ptr(), _end_of(tensor), place)
        for place, tensor in enumerate(tensors)
        if not isinstance(tensor, UninitializedParameter) and tensor.numel() and has_memory(tensor)
    )
    firsts = list(range(len(tensors)))
    together: list[int] = []
    where: tuple[str, int] | None = None
    end = 0
    for device, index, start, stop, place in pieces:
        if where != (device, index) or start >= end:
            together, where, end = [], (device, index), stop
        together.append(place)
        end = max(end, stop)
        for each in together:
            firsts[each] = min(together)
    return firsts


def _end_of(tensor: Tensor) -> int:
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()
