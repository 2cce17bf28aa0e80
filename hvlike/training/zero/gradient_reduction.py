"""The reduction of gradients that ZeRO owns: each rank gets those of its own parameters, and no others."""

from __future__ import annotations

import torch
from torch import Tensor

from hvlike.collectives.reductions import Average, arithmetic_of
from hvlike.planes.cuda.jobs import home_of
from hvlike.planes.plane import Plane
from hvlike.training.zero.packing import Packing
from hvlike.training.zero.shares import Shares
from hvlike.transport.routine import Routine


class GradientReduction:
    """Averages gradients over the ranks, each on the rank that owns its parameter."""

    def __init__(self, shares: Shares, rank: int) -> None:
        self._rank = rank
        self._shares = shares
        self._parameters = shares.parameters
        self._packing = Packing(self._parameters, shares.owners)

    def run(self, plane: Plane, *, active: bool) -> Routine[None]:
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
