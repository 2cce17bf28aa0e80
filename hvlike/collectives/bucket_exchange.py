"""The exchanges of one bucket: what a compressor with rounds of its own reduces and shares through."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hvlike.collectives.operand import Operand
from hvlike.planes.arithmetic import Arithmetic
from hvlike.planes.cuda.jobs import home_of, in_host_memory
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
        operands = [Operand(tensor, None, home=home_of(self._plane)) for tensor in tensors]
        if operands:
            yield from self._plane.gather([operand.flat.view(torch.uint8) for operand in operands], owners)
        for operand in operands:
            operand.write_back()

    def are_finite(self, groups: Sequence[Sequence[torch.Tensor]]) -> Routine[list[bool]]:
        """See Exchange.are_finite."""
        if not groups:
            return []
        flags = [torch.stack([tensor.isfinite().all() for tensor in group]).all() for group in groups]
        answers: list[bool] = []

        def read(_: Plane, copies: Sequence[torch.Tensor]) -> Routine[None]:
            answers.extend(bool(each) for each in copies[0].tolist())
            yield from ()

        operand = Operand(torch.stack(flags).view(torch.uint8), None, home=home_of(self._plane))
        yield from in_host_memory(self._plane, [operand.flat], read)
        return answers
