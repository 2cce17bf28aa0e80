"""empty_shared: a tensor whose memory the ranks of a node share, so that allreduce works in place."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hvlike.backends.arithmetic.scratch import ordinary_tensor
from hvlike.backends.base import Backend
from hvlike.collectives.requests.process_set import ProcessSet
from hvlike.collectives.requests.reduction import Min, arithmetic_of
from hvlike.collectives.requests.request import Request, RequestSpec, synchronize
from hvlike.collectives.session.context import begin, current
from hvlike.errors import HorovodInternalError, UsageError
from hvlike.transport.fabric import Fabric
from hvlike.transport.loop.coroutine import Coroutine
from hvlike.transport.memory.allocations import Allocation, available_bytes, spread
from hvlike.transport.memory.dtypes import Array, Element, dtype_name, element_of
from hvlike.transport.world import Group

KIND = "empty_shared"


def empty_shared(
    *size: int | Sequence[int] | torch.dtype, dtype: torch.dtype | None = None, process_set: ProcessSet | None = None
) -> torch.Tensor:
    """Make a CPU tensor in memory that this rank shares with the others of its node.

    Collective: every rank of the set calls it, in the same order as the others. Blocks until done.

    A reduction in place (`allreduce_`, a DistributedOptimizer whose gradients are views of it) reads and writes the
    tensors of all ranks of the node where they are, where every rank passes the same part of the same shared tensor.
    Anywhere else it works as with any tensor. The results are the same to the last bit. Its memory is freed on each
    rank once nothing refers to its storage.

    Args:
        size: As for torch.empty: numbers, or one sequence of them; the same on every rank.
        dtype: Default: torch's default dtype. It may also stand last without its name: empty_shared((3, 4),
            torch.float64).
        process_set: The ranks to run among. Default: all ranks.

    Returns:
        A tensor of this rank, not initialised: only operations carry values between ranks. It records no gradient.

    Raises:
        UsageError: On this rank alone, for arguments that make no tensor (a ValueError).
        MismatchError: On every rank, if dtypes differ; ShapeMismatchError, if shapes differ.
        HorovodInternalError: On every rank, if a node lacks the memory.

    Example:
        >>> gradients = hvd.empty_shared(1000)
    """
    _, set_state, name, _, _ = begin(KIND, None, process_set)
    size, dtype = _dtype_of(size, dtype)
    shape = _shape(size)
    wanted = torch.get_default_dtype() if dtype is None else dtype
    if not isinstance(wanted, torch.dtype):
        raise UsageError(f"empty_shared: expected a torch.dtype, got {wanted!r}.")
    element = element_of(wanted)
    making = _Making(current().fabric, set_state.group, math.prod(shape), element)

    def tensor_of(request: Request) -> torch.Tensor:
        return ordinary_tensor(making.result(), wanted).view(shape)

    spec = RequestSpec(KIND, dtypes=(dtype_name(wanted),), shapes=(shape,))
    handle = set_state.controller.submit(spec, name, [], tensor_of, wake=False, job=lambda agreed: making.run)
    result: torch.Tensor = synchronize(handle)
    return result


class _Making:
    """The memory of one tensor, from the question whether there is enough to what came of it."""

    def __init__(self, fabric: Fabric, group: Group, length: int, element: Element) -> None:
        self._fabric = fabric
        self._group = group
        self._length = length
        self._storage = element.storage
        self._nbytes = length * element.itemsize
        self._memory: Array | None = None

    def run(self, backend: Backend) -> Coroutine[None]:
        """Share the memory; all ranks of the group get it or none does. Collective over the group."""
        group, nbytes = self._group, self._nbytes
        if group.size == 1 or not nbytes:
            self._memory = self._ordinary()
            return
        number = self._fabric.allocations.next_number(group.number)
        room = available_bytes()
        enough = room is None or group.local_size * spread(nbytes) <= room
        if not (yield from _all(backend, group, enough)):
            return
        memory = yield from self._share(number)
        if (yield from _all(backend, group, memory is not None)):
            self._memory = memory

    def _share(self, number: tuple[int, int]) -> Coroutine[Array | None]:
        group, fabric, nbytes = self._group, self._fabric, self._nbytes
        if group.local_size == 1:
            return self._ordinary()
        segment = yield from fabric.share(group, (KIND, number), group.local_size * spread(nbytes))
        if segment is None:
            return None
        ranks = [group.ranks[position] for position in group.node]
        allocation = Allocation(number, ranks, fabric.world.rank, nbytes, segment)
        return fabric.allocations.add(allocation, self._storage) if allocation.populate() else None

    def _ordinary(self) -> Array | None:
        """Memory that is not shared; None where there is not enough."""
        try:
            return np.empty(self._length, self._storage)
        except (MemoryError, ValueError):
            return None

    def result(self) -> Array:
        """The memory of this rank's tensor. Raises: HorovodInternalError when some rank could not have them."""
        if self._memory is None:
            copies = f"{self._nbytes} bytes for each of the ranks of a node"
            raise HorovodInternalError(
                f"empty_shared: a node cannot share {copies}: there is not so much memory free, or neither a memfd "
                "opened through /proc nor a file in /dev/shm works. Ask for less, or use torch.empty, whose tensors "
                "are reduced through a small staging ring."
            )
        return self._memory


def _all(backend: Backend, group: Group, fine: bool) -> Coroutine[bool]:
    """True on every rank if it is fine on every rank."""
    flag = torch.tensor([int(fine)], dtype=torch.int32, device="cpu")
    yield from backend.allreduce([flag], arithmetic_of(torch.int32, Min, group.size, 1.0, 1.0))
    return bool(flag)


def _dtype_of(
    size: tuple[int | Sequence[int] | torch.dtype, ...], dtype: torch.dtype | None
) -> tuple[tuple[int | Sequence[int] | torch.dtype, ...], torch.dtype | None]:
    """The size without a dtype that stands behind it, and the dtype."""
    if not size or not isinstance(size[-1], torch.dtype):
        return size, dtype
    if dtype is not None:
        raise UsageError(f"empty_shared: expected one dtype, got {size[-1]} and dtype={dtype}.")
    return size[:-1], size[-1]


def _shape(size: Sequence[int | Sequence[int] | torch.dtype]) -> tuple[int, ...]:
    given: Sequence[Any] = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
    try:
        shape = tuple(operator.index(length) for length in given)
    except TypeError:
        shape = (-1,)
    if any(length < 0 for length in shape):
        raise UsageError(f"empty_shared: expected numbers of at least 0, or one sequence of them, got {size!r}.")
    return shape
