"""The plane of a rank that is alone in its group, for tensors of a GPU: only the factors are left to apply."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvlike.planes.arithmetic import Arithmetic
from hvlike.planes.cuda.scaling import scale_
from hvlike.planes.cuda.staged import StagedPlane
from hvlike.transport.routine import Routine


class SoloDevicePlane(StagedPlane):
    """Nothing leaves the device, except what has to be computed by the host."""

    launches = True

    def _allreduce(self, tensors: Sequence[torch.Tensor], arithmetic: Arithmetic) -> Routine[None]:
        factors = arithmetic.factors
        scale_(tensors, factors.prescale)
        scale_(tensors, factors.postscale / factors.divisor)
        yield from ()

    def _reduce_scatter(
        self, tensors: Sequence[torch.Tensor], owners: Sequence[int], arithmetic: Arithmetic
    ) -> Routine[None]:
        yield from self._allreduce(tensors, arithmetic)

    def _gather(self, tensors: Sequence[torch.Tensor], owners: Sequence[int]) -> Routine[None]:
        yield from ()

    def _alltoall(self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> Routine[None]:
        receives[0].copy_(sends[0])
        yield from ()
