"""The nccl backend: every rank has a GPU of its own, and NCCL moves the tensors between them.

A call puts kernels into the stream and returns; nothing waits. What NCCL cannot reduce as the host does (whole numbers
with factors, products of complex numbers, int16) goes through host memory.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.backends.base import Backend
from hvlike.backends.cuda.nccl import Communicator
from hvlike.backends.cuda.runtime import DeviceRuntime, Event
from hvlike.backends.cuda.staged_backend import StagedBackend, scale_
from hvlike.errors import HorovodInternalError, StalledError
from hvlike.transport.loop.coroutine import Coroutine
from hvlike.transport.memory.dtypes import Kind

_NAMES = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVERAGE: "avg",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
    ReduceOp.PRODUCT: "prod",
}
_NO_INTEGERS = (torch.int16,)


class Recipe(NamedTuple):
    """What is done to each tensor."""

    op: str
    """Of NCCL: sum, avg, min, max or prod."""
    before: float
    after: float
    seen_as: torch.dtype | None = None
    """The dtype that NCCL is told; None for the tensor's own."""

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The flat tensor as NCCL shall see it, without a copy."""
        return tensor if self.seen_as is None else tensor.view(self.seen_as)


def recipe_of(arithmetic: Arithmetic, size: int) -> Recipe | None:
    """How to do it among `size` ranks; None where NCCL cannot, or not with the results that the host gives."""
    op, factors, kind = arithmetic.op, arithmetic.factors, arithmetic.element.kind
    before, after = factors.prescale, factors.postscale
    if kind is Kind.BOOL:
        return Recipe("max" if op in (ReduceOp.SUM, ReduceOp.MAX) else "min", 1.0, 1.0, torch.uint8)
    if kind is Kind.INTEGER:
        plain = before == after == factors.divisor == 1
        name = "sum" if op is ReduceOp.AVERAGE else _NAMES[op]
        return Recipe(name, 1.0, 1.0) if plain and arithmetic.dtype not in _NO_INTEGERS else None
    seen_as = None
    if kind is Kind.COMPLEX:
        if op is ReduceOp.PRODUCT:
            return None
        seen_as = torch.float32 if arithmetic.dtype is torch.complex64 else torch.float64
    if factors.divisor == size and op is ReduceOp.AVERAGE:
        return Recipe("avg", before, after, seen_as)
    name = "sum" if op is ReduceOp.AVERAGE else _NAMES[op]
    return Recipe(name, before, after / factors.divisor, seen_as)


NcclCall = tuple[Callable[..., None], tuple[int, ...]]
"""A function of a communicator, and all it is given but the stream."""


class NcclBackend(StagedBackend):
    """See the head of this file. Calls of one backend are made in the same order on all ranks."""

    launches = True

    def __init__(
        self,
        host: Backend,
        runtime: DeviceRuntime,
        device: torch.device,
        place: tuple[int, int],
        communicator: Communicator,
        limit: float,
    ) -> None:
        """place: rank in the group, and its size, as in the communicator. limit: seconds for a call; 0: none."""
        super().__init__(host, runtime, device, place[0])
        self._size = place[1]
        self._communicator = communicator
        self._limit = limit
        self._address = runtime.address(self.stream)
        self._under_way: deque[tuple[Event, float]] = deque()
        self._lock = threading.Lock()

    def watch(self, now: float) -> HorovodInternalError | None:
        """See DeviceBackend."""
        if self.broken is not None:
            return None
        failure = self._communicator.error()
        if failure is not None:
            return HorovodInternalError(
                f"NCCL reports an error on the communicator of {self.home}: {failure}. Another rank has died or the "
                "connection to it has broken; set NCCL_DEBUG=INFO to see more."
            )
        under_way = self._under_way
        while under_way and self.runtime.has_passed(under_way[0][0]):
            under_way.popleft()
        if self._limit and under_way and now - under_way[0][1] > self._limit:
            return StalledError(
                f"A collective on {self.home} has not ended within {self._limit:g} s: another rank has not begun it, "
                "or what comes before it on the GPU takes that long. Set HVLIKE_NCCL_TIMEOUT_SECONDS for longer waits."
            )
        return None

    def abort(self, error: BaseException) -> None:
        """See DeviceBackend; ends kernels that wait for other ranks."""
        super().abort(error)
        self._communicator.abort()

    def _allreduce(self, tensors: Sequence[torch.Tensor], arithmetic: Arithmetic) -> Coroutine[None]:
        recipe = recipe_of(arithmetic, self._size)
        if recipe is None:
            yield from super()._allreduce(tensors, arithmetic)
            return
        flats = [recipe.view(tensor) for tensor in tensors if len(tensor)]
        scale_(flats, recipe.before)
        op, dtype = self._numbers(recipe, flats)
        self._begin(
            [
                (self._communicator.link.allReduce, (each.data_ptr(), each.data_ptr(), len(each), dtype, op))
                for each in flats
            ]
        )
        scale_(flats, recipe.after)

    def _reduce_scatter(
        self, tensors: Sequence[torch.Tensor], owners: Sequence[int], arithmetic: Arithmetic
    ) -> Coroutine[None]:
        recipe = recipe_of(arithmetic, self._size)
        if recipe is None:
            yield from super()._reduce_scatter(tensors, owners, arithmetic)
            return
        parts = [(recipe.view(tensor), owner) for tensor, owner in zip(tensors, owners, strict=True) if len(tensor)]
        if recipe.before != 1:
            # Those of others are only read.
            parts = [(flat if owner == self._rank else flat.clone(), owner) for flat, owner in parts]
            scale_([flat for flat, _ in parts], recipe.before)
        op, dtype = self._numbers(recipe, [flat for flat, _ in parts])
        self._begin(
            [
                (self._communicator.link.reduce, (flat.data_ptr(), flat.data_ptr(), len(flat), dtype, op, owner))
                for flat, owner in parts
            ]
        )
        scale_([flat for flat, owner in parts if owner == self._rank], recipe.after)

    def _gather(self, tensors: Sequence[torch.Tensor], owners: Sequence[int]) -> Coroutine[None]:
        byte = self._number_of(torch.uint8)
        self._begin(
            [
                (self._communicator.link.broadcast, (tensor.data_ptr(), tensor.data_ptr(), len(tensor), byte, owner))
                for tensor, owner in zip(tensors, owners, strict=True)
                if len(tensor)
            ]
        )
        yield from ()

    def _alltoall(self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> Coroutine[None]:
        byte, link = self._number_of(torch.uint8), self._communicator.link
        receives[self._rank].copy_(sends[self._rank])
        others = [peer for peer in range(len(sends)) if peer != self._rank]
        self._begin(
            [(link.send, (sends[peer].data_ptr(), len(sends[peer]), byte, peer)) for peer in others if len(sends[peer])]
            + [
                (link.recv, (receives[peer].data_ptr(), len(receives[peer]), byte, peer))
                for peer in others
                if len(receives[peer])
            ]
        )
        yield from ()

    def _numbers(self, recipe: Recipe, flats: Sequence[torch.Tensor]) -> tuple[int, int]:
        """NCCL's numbers of the reduction and of the dtype."""
        op = self._communicator.nccl.op(recipe.op)
        assert op is not None
        return op, self._number_of(flats[0].dtype) if flats else 0

    def _number_of(self, dtype: torch.dtype) -> int:
        number = self._communicator.nccl.dtype(dtype)
        assert number is not None
        return number

    def _begin(self, calls: Sequence[NcclCall]) -> None:
        """Put calls into the stream, as one group."""
        if not calls:
            return
        with self._lock:
            self.check()
            with self._communicator.nccl.group():
                for call, arguments in calls:
                    call(*arguments, self._address)
            self._under_way.append((self.runtime.record(self.stream), time.monotonic()))
