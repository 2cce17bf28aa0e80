"""What this rank proposes for a plan: its tensors, and how it would have them reduced.

made        the entries, in the order of the parameters; groups; sizes of buckets that fit this rank's network
changed     the program converts gradients, or a tuner tries other sizes: propose again
proposed    once for each plan, with what is known of the tensors then; all ranks derive the same plan from all
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

import torch

from hvlike.backends.cuda.runtime import kind_of
from hvlike.collectives.persistent.bucket import ReductionSettings
from hvlike.collectives.requests.plan import BucketSizes, Entry, Proposal, equal_parts
from hvlike.collectives.requests.request import order_in_memory
from hvlike.transport.memory.dtypes import dtype_name

_log = logging.getLogger("hvlike")

is_sparse: Callable[[torch.Tensor], bool] = attrgetter("is_sparse")
_dtype: Callable[[torch.Tensor], torch.dtype] = attrgetter("dtype")


class OwnProposal:
    """That of one reducer. Calls are local."""

    def __init__(
        self, entries: Sequence[Entry], groups: int | Sequence[Sequence[int]] | None, sizes: BucketSizes
    ) -> None:
        self.entries = list(entries)
        self.sizes = sizes
        self.start: Mapping[str, int] = {}  # Checksums by name, to warn where the ranks start apart
        self._groups = equal_parts(len(self.entries), groups) if isinstance(groups, int) else list(groups or [])

    def name_of(self, index: int) -> str:
        """Return the name of an entry."""
        return self.entries[index].name

    def follow_dtypes(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Take over dtypes that the program has changed, on every rank; return whether it has changed some."""
        dtypes = list(map(_dtype, tensors))
        if dtypes == [entry.dtype for entry in self.entries]:
            return False
        self.entries = [replace(entry, dtype=dtype) for entry, dtype in zip(self.entries, dtypes, strict=True)]
        return True

    def of(self, tensors: Sequence[torch.Tensor], arrived: Iterable[int], settings: ReductionSettings) -> Proposal:
        """Return the proposal for these tensors. arrived: entries in the order of their arrival, as far as known."""
        entries = self.entries
        return Proposal(
            names=tuple(entry.name for entry in entries),
            shapes=tuple(entry.shape for entry in entries),
            dtypes=tuple(dtype_name(entry.dtype) for entry in entries),
            strides=tuple(None if tensor.is_sparse else order_in_memory(tensor) for tensor in tensors),
            sparse=tuple(map(is_sparse, tensors)),
            order=tuple(dict.fromkeys([*arrived, *range(len(tensors))])),
            sizes=self.sizes,
            settings=(settings.describe(), tuple(tuple(group) for group in self._groups)),
            devices=tuple(kind_of(entry.device) for entry in entries),
            portable=settings if settings.is_portable else None,
            start=tuple(self.start.values()),
        )

    def compare_starts(self, agreed: Proposal, reducer: str, ranks: Sequence[int], *, warns: bool) -> None:
        """All ranks have proposed: warn of parameters that differ before the first step, which is the only time."""
        start, self.start = self.start, {}
        if agreed.apart is None or not warns:
            return
        position, index = agreed.apart
        name = list(start)[index]
        _log.warning(
            "%s differ before the first step of %r: %r of rank %d is not that of rank %d. Averaged gradients do not "
            "make them equal. Call hvd.broadcast_parameters(model.state_dict(), root_rank=%d) before training.",
            "buffers" if name.startswith("buffer ") else "parameters",
            reducer,
            name,
            ranks[position],
            ranks[0],
            ranks[0],
        )
