"""The mpi backend: an MPI that takes memory of GPUs carries tensors from one GPU to another; the GPUs add them up.

    reduce   every rank sends each part of a piece to the rank that owns the part, which adds up all of them
    hand     the owner sends the sum to all others

For ranks that NCCL does not serve, where the user has asked for it (HVLIKE_CUDA_AWARE_MPI=1) and a small reduction has
shown at the beginning that it works. The loop waits for the stream before it sends; for what it has received the stream
does not have to wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.base import Backend
from hvlike.backends.cuda.nccl_backend import Recipe, recipe_of
from hvlike.backends.cuda.runtime import DeviceRuntime
from hvlike.backends.cuda.staged_backend import StagedBackend, pieces_of, scale_
from hvlike.transport.loop.coroutine import Coroutine, Wait
from hvlike.transport.messages.device_messages import DeviceMessages

_HALVES = (torch.float16, torch.bfloat16)

_FOLDS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "sum": torch.Tensor.add_,
    "avg": torch.Tensor.add_,
    "min": lambda total, each: torch.minimum(total, each, out=total),
    "max": lambda total, each: torch.maximum(total, each, out=total),
    "prod": torch.Tensor.mul_,
}


def fold(ordered: Sequence[torch.Tensor], result: torch.Tensor, recipe: Recipe) -> None:
    """Write the reduction of flat tensors, one of each rank, to `result`, which may be one of them.

    16-bit floats are reduced in float32 and rounded once. The factors of the recipe are left to the caller.
    """
    if not len(result):
        return
    wide = torch.float32 if result.dtype in _HALVES else result.dtype
    total = ordered[0].to(wide, copy=True)
    for each in ordered[1:]:
        _FOLDS[recipe.op](total, each.to(wide))
    if recipe.op == "avg":
        total.mul_(1 / len(ordered))
    result.copy_(total)


Parcel = tuple[torch.Tensor, int]
"""A flat tensor, and the rank it goes to or comes from."""


class MpiBackend(StagedBackend):
    """See the head of this file. Calls of one plane are made in the same order on all ranks."""

    def __init__(
        self,
        host: Backend,
        runtime: DeviceRuntime,
        device: torch.device,
        place: tuple[int, int],
        messages: DeviceMessages,
    ) -> None:
        """place: rank in the group, and its size."""
        super().__init__(host, runtime, device, place[0])
        self._size = place[1]
        self._messages = messages

    def _allreduce(self, tensors: Sequence[torch.Tensor], arithmetic: Arithmetic) -> Coroutine[None]:
        recipe = recipe_of(arithmetic, self._size)
        if recipe is None:
            yield from super()._allreduce(tensors, arithmetic)
            return
        flats = [recipe.view(tensor) for tensor in tensors if len(tensor)]
        scale_(flats, recipe.before)
        for runs in pieces_of(flats):
            parts = [torch.tensor_split(flats[run.piece][run.start : run.stop], self._size) for run in runs]
            yield from self._reduce_parts(parts, recipe)
            own = [(each[self._rank], peer) for each in parts for peer in self._peers()]
            yield from self._exchange(own, [(each[peer], peer) for each in parts for peer in self._peers()])
        scale_(flats, recipe.after)

    def _reduce_scatter(
        self, tensors: Sequence[torch.Tensor], owners: Sequence[int], arithmetic: Arithmetic
    ) -> Coroutine[None]:
        recipe = recipe_of(arithmetic, self._size)
        if recipe is None:
            yield from super()._reduce_scatter(tensors, owners, arithmetic)
            return
        flats = [recipe.view(tensor) for tensor in tensors]
        if recipe.before != 1:
            # Those of others are only read.
            flats = [flat if owner == self._rank else flat.clone() for flat, owner in zip(flats, owners, strict=True)]
            scale_(flats, recipe.before)
        for runs in pieces_of(flats):
            parts = []
            for run in runs:
                piece = flats[run.piece][run.start : run.stop]
                parts.append([piece if rank == owners[run.piece] else piece[:0] for rank in range(self._size)])
            yield from self._reduce_parts(parts, recipe)
        scale_([flat for flat, owner in zip(flats, owners, strict=True) if owner == self._rank], recipe.after)

    def _gather(self, tensors: Sequence[torch.Tensor], owners: Sequence[int]) -> Coroutine[None]:
        parcels = list(zip(tensors, owners, strict=True))
        yield from self._exchange(
            [(tensor, peer) for tensor, owner in parcels if owner == self._rank for peer in self._peers()],
            [(tensor, owner) for tensor, owner in parcels if owner != self._rank],
        )

    def _alltoall(self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> Coroutine[None]:
        receives[self._rank].copy_(sends[self._rank])
        yield from self._exchange(
            [(sends[peer], peer) for peer in self._peers()], [(receives[peer], peer) for peer in self._peers()]
        )

    def _peers(self) -> list[int]:
        return [rank for rank in range(self._size) if rank != self._rank]

    def _reduce_parts(self, parts: Sequence[Sequence[torch.Tensor]], recipe: Recipe) -> Coroutine[None]:
        """Each rank gets the reduction of its parts, in place; parts: for each tensor one for each rank."""
        peers = self._peers()
        copies = [{peer: torch.empty_like(each[self._rank]) for peer in peers} for each in parts]
        yield from self._exchange(
            [(each[peer], peer) for each in parts for peer in peers],
            [(of_part[peer], peer) for of_part in copies for peer in peers],
        )
        for each, of_part in zip(parts, copies, strict=True):
            own = each[self._rank]
            fold([of_part.get(rank, own) for rank in range(self._size)], own, recipe)

    def _exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> Coroutine[None]:
        """Send tensors and receive others, all on the device."""
        sends, receives = ([parcel for parcel in each if len(parcel[0])] for each in (sends, receives))
        ready = self.runtime.record(self.stream)
        # MPI is the loop's.
        yield Wait.AGAIN
        while not self.runtime.has_passed(ready):
            yield Wait.POLL
        requests: list[Any] = []
        ended = False
        try:
            for tensor, peer in receives:
                requests += self._messages.receive(tensor.data_ptr(), tensor.nbytes, peer)
            for tensor, peer in sends:
                requests += self._messages.send(tensor.data_ptr(), tensor.nbytes, peer)
            while not self._messages.have_ended(requests):
                yield Wait.POLL
            ended = True
        finally:
            if not ended:
                self._messages.abandon(requests, (sends, receives))
