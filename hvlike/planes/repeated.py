"""A reduction of the same tensors over and over, as a plan has them: what the lengths alone decide is made once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from hvlike.planes.direct import Direct
from hvlike.planes.meeting import Meeting
from hvlike.planes.peer_memory import PeerReduction
from hvlike.planes.region import Region
from hvlike.transport.routine import Routine


class Repeated:
    """Tensors of the same lengths each time, in the ranks' own memory; see Repeating."""

    def __init__(
        self,
        meeting: Meeting,
        region: Region,
        direct: Direct,
        reduction: PeerReduction,
        stamp: int,
        otherwise: Callable[[Sequence[torch.Tensor]], Routine[None]],
    ) -> None:
        """stamp: of this work, the same on all ranks; otherwise: reduces tensors of which some may be shared.

        A rank that goes the other way says and does the same, unless all have shared tensors there.
        """
        self._meeting = meeting
        self._addresses = np.asarray(region.mine.addresses)
        self._direct = direct
        self._reduction = reduction
        self._stamp = stamp
        self._otherwise = otherwise

    def allreduce(self, tensors: Sequence[torch.Tensor], addresses: Sequence[int]) -> Routine[None]:
        """See Repeating."""
        if self._direct.places(tensors):
            yield from self._otherwise(tensors)
            return
        meeting, reduction = self._meeting, self._reduction
        self._addresses[: len(addresses)] = addresses
        number = meeting.announce(self._stamp, 0)
        try:
            yield from meeting.meet(number)
            reduction.begin(number)
            yield from meeting.in_peers(reduction, number)
        except BaseException:
            meeting.abandon(tensors, number)
            raise
