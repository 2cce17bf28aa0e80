"""Bytes that a rank copies straight from the tensors of others into its own, through the system: one copy, no staging.

    owner     post where its tensors lie   arrive                                  depart
    reader                                 arrive   read them, 4 MiB at a time     depart

Short tensors of one owner are read together, in one call of the system.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from hvlike.backends.shared_memory.cma import CmaMemory, layout
from hvlike.backends.shared_memory.region import Region
from hvlike.transport.memory.process_memory import ROW_BYTES, ProcessMemory, Ranges

PIECE_BYTES = 4 << 20  # Of one call of the system: in between other coroutines, and other owners, have a turn


class Source(NamedTuple):
    """What one rank has for this one."""

    owner: int
    first: int  # Among the addresses that the owner posts
    targets: Sequence[torch.Tensor]  # Contiguous bytes of this rank, as long as what lies at those addresses


class _Read(NamedTuple):
    memory: ProcessMemory
    theirs: Ranges
    mine: Ranges
    row: int
    ranges: int
    nbytes: int


class PeerReads:
    """The reads of one piece of work; made when all owners have arrived. See `Unstaged` (work_sync.py)."""

    def __init__(self, region: Region, memory: CmaMemory, sources: Sequence[Source]) -> None:
        self._left: deque[_Read] = deque()
        plans = [self._plan(region, memory, source) for source in sources]
        while any(plans):
            # From all owners in turn.
            self._left.extend(plan.popleft() for plan in plans if plan)

    def _plan(self, region: Region, memory: CmaMemory, source: Source) -> deque[_Read]:
        owner, first, targets = source
        chunks, index, starts, sizes = layout(tuple(map(len, targets)), 1, 1, PIECE_BYTES)
        theirs, mine = Ranges(sizes), Ranges(sizes)
        posted = np.asarray(region.counters[owner].addresses)[first : first + len(targets)]
        np.add(posted[index], starts, out=theirs.addresses)
        np.add(np.array([target.data_ptr() for target in targets], np.uint64)[index], starts, out=mine.addresses)
        return deque(
            _Read(memory.ranks[owner], theirs, mine, chunk.row, chunk.ranges, chunk.nbytes) for chunk in chunks
        )

    @property
    def unfinished(self) -> bool:
        return bool(self._left)

    def advance(self) -> bool:
        memory, theirs, mine, row, ranges, nbytes = self._left.popleft()
        place = ROW_BYTES * row
        memory.read(theirs.start + place, mine.start + place, ranges, nbytes)
        return True
