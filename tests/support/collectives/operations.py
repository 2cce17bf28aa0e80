"""Any operation with tensors as a value: what each rank puts in, how it is submitted, what must come out."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from support.adasum_reference import adasum
from support.collectives.inputs import LAYOUTS, contribution, reduced, same
from torch import Tensor

from hvlike import ProcessSet
from hvlike.backends.arithmetic.reduce_op import ReduceOp

REDUCING = ("allreduce", "allreduce_", "grouped_allreduce", "grouped_allreduce_")
SCATTERING = ("reducescatter", "grouped_reducescatter")
GATHERING = ("allgather", "grouped_allgather")
KINDS = (*REDUCING, *SCATTERING, *GATHERING, "broadcast", "broadcast_", "alltoall")


@dataclass(frozen=True)
class Operation:
    """One operation; everything about it follows from these values, on every rank alike."""

    kind: str
    op: ReduceOp
    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: int = 0
    seed: int = 0

    @property
    def in_place(self) -> bool:
        return self.kind.endswith("_")

    @property
    def count(self) -> int:
        """How many tensors take part."""
        return 1 + self.seed % 3 if self.kind.startswith("grouped") else 1

    def inputs(self, rank: int, ranks: Sequence[int]) -> list[Tensor]:
        """What `rank` puts in, row by row in memory."""
        shape = self.shape
        if self.kind in GATHERING:
            shape = ((self.seed + 3 * rank) % 4, *shape[1:])
        elif self.kind == "alltoall":
            shape = (sum(self.splits(rank, ranks)) + self.seed % 2, *shape[1:])
        elif self.kind in SCATTERING and not shape:
            shape = (len(ranks) + 1,)
        return [contribution(rank, shape, self.dtype, self.seed + index) for index in range(self.count)]

    def given(self, rank: int, ranks: Sequence[int]) -> list[Tensor]:
        """The same values in a layout that differs between ranks."""
        layout = LAYOUTS[(self.layout + rank) % len(LAYOUTS)]
        return [layout(each) for each in self.inputs(rank, ranks)]

    def splits(self, rank: int, ranks: Sequence[int]) -> list[int]:
        """How many rows `rank` sends to each of `ranks`."""
        dice = random.Random(1009 * self.seed + rank)
        return [dice.randrange(3) for _ in ranks]

    def root(self, ranks: Sequence[int]) -> int:
        return ranks[self.seed % len(ranks)]

    def submit(
        self, hvd: ModuleType, tensors: list[Tensor], name: str | None, ranks: Sequence[int], where: ProcessSet | None
    ) -> Any:
        """Start it on this rank; returns the handle."""
        call = getattr(hvd, f"{self.kind[:-1]}_async_" if self.in_place else f"{self.kind}_async")
        subject = tensors if self.kind.startswith("grouped") else tensors[0]
        if self.kind in (*REDUCING, *SCATTERING):
            return call(subject, op=self.op, name=name, process_set=where)
        if self.kind == "alltoall":
            return call(subject, self.splits(hvd.rank(), ranks), name=name, process_set=where)
        if self.kind.startswith("broadcast"):
            return call(subject, self.root(ranks), name=name, process_set=where)
        return call(subject, name=name, process_set=where)

    def expected(self, rank: int, ranks: Sequence[int]) -> list[Tensor]:
        """What must come out on `rank`, by definition."""
        everybody = [self.inputs(each, ranks) for each in ranks]
        columns = [list(column) for column in zip(*everybody, strict=True)]
        place = list(ranks).index(rank)
        if self.kind in REDUCING:
            if self.op is ReduceOp.ADASUM:
                return [adasum(column).to(self.dtype) for column in columns]
            return [reduced(self.op, column) for column in columns]
        if self.kind in SCATTERING:
            return [_share(reduced(self.op, column), place, len(ranks)) for column in columns]
        if self.kind in GATHERING:
            return [torch.cat(column) for column in columns]
        if self.kind == "alltoall":
            counts = [self.splits(each, ranks) for each in ranks]
            starts = [sum(row[:place]) for row in counts]
            parts = [
                rows[start : start + row[place]] for rows, start, row in zip(columns[0], starts, counts, strict=True)
            ]
            return [torch.cat(parts), torch.tensor([row[place] for row in counts], dtype=torch.int32)]
        return everybody[list(ranks).index(self.root(ranks))]

    def check(self, result: Any, tensors: list[Tensor], rank: int, ranks: Sequence[int]) -> None:
        """The result is right; the input was written, or left alone, as the call says."""
        results = list(result) if isinstance(result, (list, tuple)) else [result]
        for got, wanted in zip(results, self.expected(rank, ranks), strict=True):
            if self.op is ReduceOp.ADASUM and self.kind in REDUCING:
                # Whole numbers go in, but the factors are none: what is left after they cancel is rounded.
                tolerance = max(1e-12, 16 * torch.finfo(self.dtype).eps)
                torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)
            else:
                same(got, wanted)
        if self.in_place:
            assert all(got is mine for got, mine in zip(results, tensors, strict=True))
        else:
            assert all(torch.equal(a, b) for a, b in zip(tensors, self.inputs(rank, ranks), strict=True))


def _share(total: Tensor, place: int, size: int) -> Tensor:
    """Rows of `place` when the first ranks hold one more."""
    rows, longer = divmod(len(total), size)
    start = place * rows + min(place, longer)
    return total[start : start + rows + (place < longer)]
