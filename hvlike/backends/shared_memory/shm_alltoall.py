"""One alltoall on a node: every rank puts chunks for each other rank into its staging slots, which that one empties.

    rank 0   slots for 1: chunk 0, 1   slots for 2: chunk 0, 1        each pair of ranks goes on by itself,
    rank 1   slots for 0: chunk 0, 1   slots for 2: chunk 0, 1        two chunks deep, whatever the others do

A pair that has nothing to exchange does not look at each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from hvlike.backends.arithmetic.arithmetic import Arithmetic, Piece
from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.backends.shared_memory.region import Region, first_peer
from hvlike.backends.shared_memory.schedule import SLOTS

_BYTES = Arithmetic(torch.uint8, ReduceOp.SUM)


class ShmAlltoall:
    """What is left to put and to take."""

    def __init__(
        self,
        region: Region,
        reduced: Sequence[int],
        sends: Sequence[torch.Tensor],
        receives: Sequence[torch.Tensor],
    ) -> None:
        """sends, receives: bytes, a tensor per rank; reduced: chunks each rank has been given to reduce so far."""
        self._region = region
        self._reduced = reduced
        self._own = (receives[region.rank], sends[region.rank])
        self._putting = {peer: _chunks(sends[peer], region.chunk) for peer in region.peers if len(sends[peer])}
        self._taking = {peer: _chunks(receives[peer], region.chunk) for peer in region.peers if len(receives[peer])}
        self._copied = False

    @property
    def unfinished(self) -> bool:
        """Whether anything is left."""
        return bool(self._putting or self._taking or not self._copied)

    def step(self) -> bool:
        """Put and take one chunk for each peer where that is possible; say whether anything moved."""
        moved = False
        for peer in list(self._putting):
            moved |= self._put(peer)
        if not self._copied:
            # Only now: the peers have something to do already.
            target, source = self._own
            target.copy_(source)
            self._copied = moved = True
        for peer in list(self._taking):
            moved |= self._take(peer)
        return moved

    def _put(self, peer: int) -> bool:
        region = self._region
        turn = region.mine.passed[peer]
        if region.counters[peer].received[region.rank] <= turn - SLOTS or not self._staging_is_over(peer):
            return False
        chunks = self._putting[peer]
        chunk = chunks.popleft()
        slot = region.slot(_BYTES, region.rank, peer, turn)
        _BYTES.copy(slot[: len(chunk)], chunk)
        region.order()
        region.mine.passed[peer] = turn + 1
        if not chunks:
            del self._putting[peer]
        return True

    def _staging_is_over(self, peer: int) -> bool:
        """Whether nobody looks any more at what was staged for reductions of `peer`: it is the same memory."""
        region = self._region
        needed = self._reduced[peer]
        if region.counters[peer].reduced < needed:
            return False
        if region.rank != first_peer(peer):
            return True
        return all(each.taken[peer] >= needed for rank, each in enumerate(region.counters) if rank != peer)

    def _take(self, peer: int) -> bool:
        region = self._region
        turn = region.mine.received[peer]
        if region.counters[peer].passed[region.rank] <= turn:
            return False
        region.order()
        chunks = self._taking[peer]
        chunk = chunks.popleft()
        slot = region.slot(_BYTES, peer, region.rank, turn)
        _BYTES.copy(chunk, slot[: len(chunk)])
        region.order()
        region.mine.received[peer] = turn + 1
        if not chunks:
            del self._taking[peer]
        return True


def _chunks(tensor: torch.Tensor, size: int) -> deque[Piece]:
    """Cut a tensor of bytes into chunks of at most `size`."""
    whole = _BYTES.view(tensor)
    return deque(whole[start : start + size] for start in range(0, len(whole), size))
