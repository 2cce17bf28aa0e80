"""How gradients get to the owners of their parameters, and updated parameters to all ranks.

Each large tensor travels alone, the small ones of each owner together in one flat tensor.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.backends.base import Backend
from hvlike.backends.cuda.device_jobs import home_of
from hvlike.backends.fusion_buffer import SMALL_BYTES
from hvlike.collectives.api.allreduce import allreduce
from hvlike.collectives.requests.process_set import ProcessSet
from hvlike.collectives.requests.reduction import Average, Operand, arithmetic_of, is_dense, row_by_row
from hvlike.collectives.requests.request import order_in_memory
from hvlike.training.gradients.parameters import value_checksums
from hvlike.training.zero.partition import Partition
from hvlike.transport.loop.coroutine import Coroutine


@contextmanager
def temporary_gradients(gradients: Mapping[Tensor, Tensor | None]) -> Iterator[None]:
    """Give these parameters these gradients; afterwards they have those of before."""
    kept = [(parameter, parameter.grad) for parameter in gradients]
    for parameter, gradient in gradients.items():
        parameter.grad = gradient
    try:
        yield
    finally:
        for parameter, before in kept:
            parameter.grad = before


_log = logging.getLogger("hvlike")


def warn_if_gradients_differ(
    name: str, gradients: Sequence[Tensor | None], process_set: ProcessSet | None, *, warns: bool
) -> None:
    """Warn where the gradients of the ranks differ: each would be updated with those of its owner alone.

    name: of the optimizer, the same on every rank. warns: this rank says it. Sparse gradients are not looked at.
    Collective over the process set; blocks. Ranks that have joined are not asked.
    """
    dense = [each for each in gradients if each is not None and not each.is_sparse]
    mine = zlib.crc32(repr(value_checksums(dense)).encode())
    extremes = torch.tensor([mine, -mine], dtype=torch.int64, device="cpu")
    both = allreduce(extremes, op=ReduceOp.MAX, name=f"{name}.are gradients equal", process_set=process_set)
    highest, lowest = both.tolist()
    if warns and highest != -lowest:
        _log.warning(
            "the gradients differ between the ranks in the first step of a ZeroRedundancyOptimizer, so each parameter "
            "is updated with those of one rank alone. Wrap the model in hvlike.nn.DistributedDataParallel, or pass "
            "reduce_gradients=True."
        )


@dataclass(frozen=True)
class PackedTensors:
    """A large tensor, or the small ones of one owner with the memory they travel in."""

    owner: int
    places: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    buffer: Tensor | None = None
    views: tuple[Tensor, ...] = ()


class Packing:
    """Packs tensors of the same shapes again and again: parameters or their gradients."""

    def __init__(self, parameters: Sequence[Tensor], owners: Sequence[int]) -> None:
        """owners: the rank that has what the others want, or wants what they have, by parameter."""
        large: list[PackedTensors] = []
        small: dict[tuple[int, torch.dtype], list[int]] = {}
        for place, parameter in enumerate(parameters):
            if parameter.numel() * parameter.element_size() < SMALL_BYTES:
                small.setdefault((owners[place], parameter.dtype), []).append(place)
            else:
                large.append(PackedTensors(owners[place], (place,), order_in_memory(parameter)))
        self._parameters = list(parameters)
        self._large = large
        self._small = [(owner, places) for (owner, _), places in small.items()]
        self._home: torch.device | None = None
        self._pieces = self._made_for(None)
        self.owners = [piece.owner for piece in self._pieces]
        """The owner of each piece."""

    def pack(
        self, tensors: Sequence[Tensor], *, owner: int | None = None, home: torch.device | None = None
    ) -> list[Operand]:
        """Return the pieces; `owner`: of the small tensors only those of this rank matter, None: all of them.

        home: the device that they travel from, None for host memory.
        """
        if home != self._home:
            self._home, self._pieces = home, self._made_for(home)
        operands = []
        for piece in self._pieces:
            if piece.buffer is None:
                operands.append(Operand(tensors[piece.places[0]], piece.strides, home=home))
                continue
            if owner is None or owner == piece.owner:
                torch._foreach_copy_(list(piece.views), [tensors[place].detach() for place in piece.places])
            operands.append(Operand(piece.buffer, None, home=home))
        return operands

    def _made_for(self, home: torch.device | None) -> list[PackedTensors]:
        return [_together(owner, places, self._parameters, home) for owner, places in self._small] + self._large

    def unpack(self, tensors: Sequence[Tensor], operands: Sequence[Operand], owners: Collection[int]) -> None:
        """Put what the pieces of these owners hold back into the tensors."""
        for piece, operand in zip(self._pieces, operands, strict=True):
            if piece.owner not in owners:
                continue
            if piece.buffer is None:
                operand.write_back()
            else:
                torch._foreach_copy_([tensors[place].detach() for place in piece.places], list(piece.views))


def _together(
    owner: int, places: Sequence[int], parameters: Sequence[Tensor], home: torch.device | None
) -> PackedTensors:
    sizes = [parameters[place].numel() for place in places]
    # Kept for steps in other threads, which may not be in the inference mode of this one.
    with torch.inference_mode(False):
        buffer = torch.empty(sum(sizes), dtype=parameters[places[0]].dtype, device=home or "cpu")
    views = tuple(
        part.view(parameters[place].shape) for part, place in zip(torch.split(buffer, sizes), places, strict=True)
    )
    return PackedTensors(owner, tuple(places), None, buffer, views)


class FlatParameters:
    """A flat tensor for each owner and device, and the parameters as views of it."""

    def __init__(self, parameters: Sequence[Tensor], owners: Sequence[int]) -> None:
        self._parameters = list(parameters)
        self._owners = list(owners)
        self.owners: list[int] = []
        """The owner of each flat tensor."""
        self._flats: list[Tensor] = []
        self._places: list[int] = []
        self._fill()

    def operands(self, home: torch.device | None = None) -> list[Operand]:
        """The flat tensors, on `home`. Parameters that have left them, as the model was moved or converted, come back.

        home: the device that they travel from, None for host memory.
        """
        if [parameter.data_ptr() for parameter in self._parameters] != self._places:
            self._fill()
        return [Operand(flat, None, home=home) for flat in self._flats]

    def _fill(self) -> None:
        """Move the parameters into new flat tensors; their values stay."""
        self.owners, self._flats = [], []
        members: dict[tuple[int, torch.device, torch.dtype], list[Tensor]] = {}
        for parameter, owner in zip(self._parameters, self._owners, strict=True):
            members.setdefault((owner, parameter.device, parameter.dtype), []).append(parameter)
        for (owner, device, dtype), parameters in members.items():
            with torch.inference_mode(False):
                flat = torch.empty(sum(each.numel() for each in parameters), dtype=dtype, device=device)
            start = 0
            for parameter in parameters:
                strides = parameter.stride() if is_dense(parameter.shape, parameter.stride()) else None
                view = flat.as_strided(parameter.shape, strides or row_by_row(parameter.shape), start)
                view.copy_(parameter.detach())
                parameter.data = view
                start += view.numel()
            self.owners.append(owner)
            self._flats.append(flat)
        self._places = [parameter.data_ptr() for parameter in self._parameters]


class GradientReduction:
    """Averages gradients over the ranks, each on the rank that owns its parameter."""

    def __init__(self, shares: Partition, rank: int) -> None:
        self._rank = rank
        self._shares = shares
        self._parameters = shares.parameters
        self._packing = Packing(self._parameters, shares.owners)

    def run(self, plane: Backend, *, active: bool) -> Coroutine[None]:
        """Reduce what backward has left; a rank that is not active contributes zeros, as does who has no gradient.

        Afterwards the parameters of this rank have the mean as their gradient, all others have none.
        """
        gradients = self._contributions(active=active)
        operands = self._packing.pack(gradients, home=home_of(plane))
        size = self._shares.ranks
        flats = [operand.flat for operand in operands]
        arithmetic = arithmetic_of(self._parameters[0].dtype, Average, size, 1.0, 1.0)
        yield from plane.reduce_scatter(flats, self._packing.owners, arithmetic)
        self._packing.unpack(gradients, operands, [self._rank])
        for parameter, gradient, owner in zip(self._parameters, gradients, self._shares.owners, strict=True):
            parameter.grad = gradient if owner == self._rank else None

    def _contributions(self, *, active: bool) -> list[Tensor]:
        spare: Tensor | None = None
        gradients = []
        for parameter, owner in zip(self._parameters, self._shares.owners, strict=True):
            gradient = parameter.grad if active else None
            if gradient is not None and gradient.is_sparse:
                gradient = gradient.to_dense()
            if gradient is None and owner == self._rank:
                gradient = torch.zeros_like(parameter, requires_grad=False)
            if gradient is None:
                # Only read: one piece of memory serves all that others own.
                if spare is None or spare.numel() < parameter.numel():
                    spare = torch.zeros(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
                gradient = spare[: parameter.numel()].view(parameter.shape)
            gradients.append(gradient)
        return gradients


class ParameterExchange:
    """Writes each parameter from its owner to the others.

    Those that required no gradient when this was made travel only where their owner has a gradient for them: of a model
    that is mostly frozen little is sent.
    """

    def __init__(self, shares: Partition, rank: int, *, as_buckets: bool) -> None:
        self._rank = rank
        self._others = [other for other in range(shares.ranks) if other != rank]
        moving = [place for place, parameter in enumerate(shares.parameters) if parameter.requires_grad]
        self._moving: list[Tensor] = [shares.parameters[place] for place in moving]
        owners = [shares.owners[place] for place in moving]
        self._buckets = FlatParameters(self._moving, owners) if as_buckets else None
        self._packing = None if as_buckets else Packing(self._moving, owners)
        self._frozen: list[list[Tensor]] = [[] for _ in range(shares.ranks)]
        for parameter, owner in zip(shares.parameters, shares.owners, strict=True):
            if not parameter.requires_grad:
                self._frozen[owner].append(parameter)

    def run(self, plane: Backend) -> Coroutine[None]:
        """Gather; the same on every rank."""
        home = home_of(plane)
        if self._buckets is not None:
            operands = self._buckets.operands(home)
            yield from _gather(plane, operands, self._buckets.owners)
            for operand in operands:
                operand.write_back()
        elif self._packing is not None:
            operands = self._packing.pack(self._moving, owner=self._rank, home=home)
            yield from _gather(plane, operands, self._packing.owners)
            self._packing.unpack(self._moving, operands, self._others)
        if any(self._frozen):
            yield from self._gather_thawed(plane)

    def _gather_thawed(self, plane: Backend) -> Coroutine[None]:
        """Each owner says which of its frozen parameters have a gradient now; those follow."""
        flags = [torch.zeros(len(frozen), dtype=torch.uint8, device="cpu") for frozen in self._frozen]
        for index, parameter in enumerate(self._frozen[self._rank]):
            flags[self._rank][index] = parameter.grad is not None
        yield from plane.gather(flags, list(range(len(flags))))
        thawed = [
            (parameter, owner)
            for owner, (frozen, said) in enumerate(zip(self._frozen, flags, strict=True))
            for parameter, moves in zip(frozen, said.tolist(), strict=True)
            if moves
        ]
        home = home_of(plane)
        operands = [Operand(parameter, order_in_memory(parameter), home=home) for parameter, _ in thawed]
        yield from _gather(plane, operands, [owner for _, owner in thawed])
        for operand in operands:
            operand.write_back()


def _gather(plane: Backend, operands: Sequence[Operand], owners: Sequence[int]) -> Coroutine[None]:
    if operands:
        yield from plane.gather([operand.flat.view(torch.uint8) for operand in operands], owners)
