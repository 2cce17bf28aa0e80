"""The exchanges of one bucket: what a compressor with rounds of its own reduces and shares through."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hvlike.collectives.operand import Operand
from hvlike.planes.arithmetic import Arithmetic
from hvlike.planes.cuda.jobs import home_of
from hvlike.planes.packing import Packer
from hvlike.planes.plane import Plane
from hvlike.transport.routine import Routine

Packers = dict[tuple[torch.dtype, tuple[int, ...]], Packer]
"""What is kept from step to step: each round of a bucket has tensors of its own lengths."""


class BucketExchange:
    """An Exchange over the plane of a bucket, with the arithmetic of its plan."""

    def __init__(
        self,
        plane: Plane,
        place: tuple[int, int],
        factor: float,
        arithmetic: Callable[[torch.dtype], Arithmetic],
        packers: Packers,
    ) -> None:
        """place: the rank among those of the reduction, and their number."""
        self.rank, self.size = place
        self.factor = factor
        self._plane = plane
        self._arithmetic = arithmetic
        self._packers = packers

    def allreduce(self, tensors: Sequence[torch.Tensor]) -> Routine[None]:
        """See Exchange.allreduce; every dtype is a reduction of its own."""
        operands = [Operand(tensor, None, home=home_of(self._plane)) for tensor in tensors]
        for dtype in dict.fromkeys(operand.flat.dtype for operand in operands):
            flats = [operand.flat for operand in operands if operand.flat.dtype is dtype]
            packer = self._packers.setdefault((dtype, tuple(len(flat) for flat in flats)), Packer())
            yield from packer.allreduce(self._plane, flats, self._arithmetic(dtype))
        for operand in operands:
            operand.write_back()

    def share(self, tensors: Sequence[torch.Tensor], owners: Sequence[int]) -> Routine[None]:
        """See Exchange.share."""
        if tensors:
            yield from self._plane.gather([tensor.view(-1).view(torch.uint8) for tensor in tensors], owners)
