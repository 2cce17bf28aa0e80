"""The updated parameters on their way from their owners to all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hvlike.collectives.operand import Operand
from hvlike.collectives.request import order_in_memory
from hvlike.planes.cuda.jobs import home_of
from hvlike.planes.plane import Plane
from hvlike.training.zero.buckets import Buckets
from hvlike.training.zero.packing import Packing
from hvlike.training.zero.shares import Shares
from hvlike.transport.routine import Routine


class ParameterExchange:
    """Writes each parameter from its owner to the others.

    Those that required no gradient when this was made travel only where their owner has a gradient for them: of a model
    that is mostly frozen little is sent.
    """

    def __init__(self, shares: Shares, rank: int, *, as_buckets: bool) -> None:
        self._rank = rank
        self._others = [other for other in range(shares.ranks) if other != rank]
        moving = [place for place, parameter in enumerate(shares.parameters) if parameter.requires_grad]
        self._moving: list[Tensor] = [shares.parameters[place] for place in moving]
        owners = [shares.owners[place] for place in moving]
        self._buckets = Buckets(self._moving, owners) if as_buckets else None
        self._packing = None if as_buckets else Packing(self._moving, owners)
        self._frozen: list[list[Tensor]] = [[] for _ in range(shares.ranks)]
        for parameter, owner in zip(shares.parameters, shares.owners, strict=True):
            if not parameter.requires_grad:
                self._frozen[owner].append(parameter)

    def run(self, plane: Plane) -> Routine[None]:
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

    def _gather_thawed(self, plane: Plane) -> Routine[None]:
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


def _gather(plane: Plane, operands: Sequence[Operand], owners: Sequence[int]) -> Routine[None]:
    if operands:
        yield from plane.gather([operand.flat.view(torch.uint8) for operand in operands], owners)
