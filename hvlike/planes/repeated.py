"""A reduction of the same tensors over and over, as a plan has them: what the lengths alone decide is made once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from hvlike.planes.direct import Direct, Place, place_word
from hvlike.planes.fastest import Fastest
from hvlike.planes.meeting import Meeting
from hvlike.planes.region import Region
from hvlike.transport.routine import Routine


class Repeated:
    """Tensors of the same lengths each time, in the ranks' own memory; see Repeating."""

    def __init__(
        self,
        meeting: Meeting,
        region: Region,
        direct: Direct,
        fastest: Fastest,
        stamp: int,
        in_place: Callable[[Sequence[torch.Tensor], dict[int, Place], int], Routine[None]],
    ) -> None:
        """stamp: of this work, the same on all ranks; in_place: reduces what lies in shared allocations, and the rest.

        It is called after the work of that number has been announced, and all ranks have the same places.
        """
        self._meeting = meeting
        self._region = region
        self._addresses = np.asarray(region.mine.addresses)
        self._direct = direct
        self._fastest = fastest
        self._stamp = stamp
        self._in_place = in_place

    def allreduce(self, tensors: Sequence[torch.Tensor], addresses: list[int]) -> Routine[None]:
        """See Repeating."""
        meeting, fastest = self._meeting, self._fastest
        places, use = self._direct.places(tensors), fastest.next
        if not use.staged:
            self._addresses[: len(addresses)] = addresses
        number = meeting.announce(self._stamp, place_word(places))
        try:
            # Who has nothing in shared allocations does not ask whether others have.
            if places or use.meets:
                yield from meeting.meet(number)
            if places and self._region.is_same_place(number):
                yield from self._in_place(tensors, places, number)
            else:
                yield from fastest.reduce(use, addresses, number)
        except BaseException:
            meeting.abandon(tensors, number)
            raise
