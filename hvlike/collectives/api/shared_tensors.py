"""empty_shared: a tensor whose memory the ranks of a node share, so that allreduce works in place."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hvlike.backends.arithmetic.kernels import ordinary_tensor
from hvlike.backends.base import Backend
from hvlike.backends.operation import synchronize
from hvlike.collectives.requests.process_set import ProcessSet
from hvlike.collectives.requests.reduction import Min, arithmetic_of
from hvlike.collectives.requests.request import Request, RequestSpec
from hvlike.collectives.session.context import begin, current
from hvlike.errors import HorovodInternalError, UsageError
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
    last = size[-1] if size else None
    if isinstance(last, torch.dtype):
        if dtype is not None:
            raise UsageError(f"empty_shared: expected one dtype, got {last} and dtype={dtype}.")
        size, dtype = size[:-1], last
    shape = _shape(size)
    wanted = torch.get_default_dtype() if dtype is None else dtype
    if not isinstance(wanted, torch.dtype):
        raise UsageError(f"empty_shared: expected a torch.dtype, got {wanted!r}.")
    element = element_of(wanted)
    length, made = math.prod(shape), list[Array]()

    def run(backend: Backend) -> Coroutine[None]:
        memory = yield from _memory(backend, set_state.group, length, element)
        made.extend(() if memory is None else [memory])

    def tensor_of(request: Request) -> torch.Tensor:
        if not made:
            raise HorovodInternalError(
                f"empty_shared: the ranks of a node cannot share {length * element.itemsize} bytes each: not enough "
                "memory is free, or neither a memfd opened through /proc nor a file in /dev/shm works. Ask for less, "
                "or use torch.empty, whose tensors are reduced through a small staging ring."
            )
        return ordinary_tensor(made[0], wanted).view(shape)

    spec = RequestSpec(KIND, dtypes=(dtype_name(wanted),), shapes=(shape,))
    handle = set_state.controller.submit(spec, name, [], tensor_of, wake=False, job=lambda agreed: run)
    result: torch.Tensor = synchronize(handle)
    return result


def _memory(backend: Backend, group: Group, length: int, element: Element) -> Coroutine[Array | None]:
    """The memory of this rank; all ranks of the group get theirs or none does. Collective over the group."""
    fabric, nbytes, memory = current().fabric, length * element.itemsize, None
    if group.size == 1 or not nbytes:
        return _ordinary(length, element)
    number = fabric.allocations.next_number(group.number)
    room = available_bytes()
    if not (yield from _all(backend, group, room is None or group.local_size * spread(nbytes) <= room)):
        return None
    if group.local_size == 1:
        memory = _ordinary(length, element)
    else:
        segment = yield from fabric.share(group, (KIND, number), group.local_size * spread(nbytes))
        if segment is not None:
            ranks = [group.ranks[position] for position in group.node]
            allocation = Allocation(number, ranks, fabric.world.rank, nbytes, segment)
            memory = fabric.allocations.add(allocation, element.storage) if allocation.populate() else None
    return memory if (yield from _all(backend, group, memory is not None)) else None


def _ordinary(length: int, element: Element) -> Array | None:
    """Memory that is not shared; None where there is not enough."""
    try:
        return np.empty(length, element.storage)
    except (MemoryError, ValueError):
        return None


def _all(backend: Backend, group: Group, fine: bool) -> Coroutine[bool]:
    flag = torch.tensor([int(fine)], dtype=torch.int32, device="cpu")
    yield from backend.allreduce([flag], arithmetic_of(torch.int32, Min, group.size, 1.0, 1.0))
    return bool(flag)


def _shape(size: Sequence[int | Sequence[int] | torch.dtype]) -> tuple[int, ...]:
    given: Sequence[Any] = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
    try:
        shape = tuple(operator.index(length) for length in given)
    except TypeError:
        shape = (-1,)
    if any(length < 0 for length in shape):
        raise UsageError(f"empty_shared: expected numbers of at least 0, or one sequence of them, got {size!r}.")
    return shape
