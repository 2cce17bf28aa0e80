"""Any operation with tensors as a value: what each rank puts in, how it is submitted, what must come out."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from support.adasum_reference import adasum
from support.collectives.inputs import (
    DTYPES,
    FLOATS,
    LAYOUTS,
    contribution,
    defined,
    inferred,
    lazy,
    leaf,
    reduced,
    same,
    untouched_beside,
)
from torch import Tensor

from hvlike import ProcessSet
from hvlike.backends.arithmetic.reduce_op import ReduceOp

REDUCING = ("allreduce", "allreduce_", "grouped_allreduce", "grouped_allreduce_")
SCATTERING = ("reducescatter", "grouped_reducescatter")
GATHERING = ("allgather", "grouped_allgather")
KINDS = (*REDUCING, *SCATTERING, *GATHERING, "broadcast", "broadcast_", "alltoall")
FORMS = (*LAYOUTS, lazy, leaf, inferred)
OTHER_SHAPES = ((), (3, 4), (0, 2))
"""Of the second and third tensor of a group, which are of other dtypes, too."""


@dataclass(frozen=True)
class Operation:
    """One operation; everything about it follows from these values, on every rank alike."""

    kind: str
    op: ReduceOp
    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: int = 0
    seed: int = 0
    prescale: float = 1.0
    postscale: float = 1.0
    mixed: bool = True
    """Whether each rank has another layout."""
    blocking: bool = False
    shared: bool = False
    """Whether what is reduced in place lies in shared memory; then it blocks."""

    @property
    def in_place(self) -> bool:
        return self.kind.endswith("_")

    @property
    def count(self) -> int:
        """How many tensors take part."""
        return 1 + self.seed % 3 if self.kind.startswith("grouped") else 1

    @property
    def waits(self) -> bool:
        """Whether the call returns the result."""
        return self.blocking or self.in_shared_memory

    @property
    def in_shared_memory(self) -> bool:
        return self.shared and self.kind in ("allreduce_", "grouped_allreduce_")

    def dtype_of(self, index: int) -> torch.dtype:
        known = FLOATS if self.op is ReduceOp.ADASUM else [each for each in DTYPES if defined(self.op, each)]
        if (self.prescale, self.postscale) != (1, 1):
            known = [each for each in known if each is not torch.bool]
        return known[(known.index(self.dtype) + self.seed * index) % len(known)] if index else self.dtype

    def inputs(self, rank: int, ranks: Sequence[int]) -> list[Tensor]:
        """What `rank` puts in, row by row in memory."""
        shapes = [self.shape, *OTHER_SHAPES][: self.count]
        if self.kind in GATHERING:
            # A tensor without dimensions is one row.
            shapes = [(self.rows(shape[0], rank), *shape[1:]) if shape else shape for shape in shapes]
        elif self.kind == "alltoall":
            spare = self.seed // 4 % 2 if self.given_splits(rank, ranks) is not None else 0
            shapes = [(sum(self.splits(rank, ranks)) + spare, *self.shape[1:])]
        elif self.kind in SCATTERING:
            shapes = [shape or (len(ranks) + 1,) for shape in shapes]
        values = [contribution(rank, shape, self.dtype_of(i), self.seed + i) for i, shape in enumerate(shapes)]
        if self.op is ReduceOp.PRODUCT and self.prescale != 1:
            # Products of larger numbers would overflow before the postscale brings them back.
            return [
                each if each.is_complex() else each.clip(min=0 if each.dtype is torch.uint8 else -1, max=1)
                for each in values
            ]
        return values

    def rows(self, most: int, rank: int) -> int:
        """How many rows `rank` has to be gathered: none up to all of them."""
        return most - rank if most > 100 else (self.seed + 3 * rank) % 4

    def given(self, rank: int, ranks: Sequence[int], hvd: Any = None, where: ProcessSet | None = None) -> list[Tensor]:
        """The same values in a layout, which may differ between ranks."""
        values = self.inputs(rank, ranks)
        if self.in_shared_memory and hvd is not None:
            return [hvd.empty_shared(each.shape, dtype=each.dtype, process_set=where).copy_(each) for each in values]
        form = FORMS[(self.layout + (rank if self.mixed else 0)) % len(FORMS)]
        return [form(each) for each in values]

    def splits(self, rank: int, ranks: Sequence[int]) -> list[int]:
        """How many rows `rank` sends to each of `ranks`: as many to each, all to one, or any number."""
        many = self.shape[0] // 3 if self.shape and self.shape[0] > 100 else 1
        dice = random.Random(1009 * self.seed + rank)
        match self.seed % 4:
            case 0:
                return [many * ((self.seed + rank) % 3)] * len(ranks)
            case 1:
                return [3 * many * (other == self.root(ranks)) for other in ranks]
        return [many * dice.randrange(3) for _ in ranks]

    def given_splits(self, rank: int, ranks: Sequence[int]) -> list[int] | Tensor | None:
        """The same as this rank says it; nothing where each gets as many, and others may say it."""
        splits = self.splits(rank, ranks)
        if self.seed % 4 == 2:
            return torch.tensor(splits, dtype=torch.int32 if rank % 2 else torch.int64)
        return None if self.seed % 4 == 0 and (rank + self.seed // 4) % 2 else splits

    def root(self, ranks: Sequence[int]) -> int:
        return ranks[self.seed % len(ranks)]

    def submit(
        self, hvd: ModuleType, tensors: list[Tensor], name: str | None, ranks: Sequence[int], where: ProcessSet | None
    ) -> Any:
        """Start it on this rank; returns the handle, or the result if it waits."""
        stem, place = self.kind.removesuffix("_"), "_" if self.in_place else ""
        call = getattr(hvd, stem + ("" if self.waits else "_async") + place)
        subject = tensors if self.kind.startswith("grouped") else tensors[0]
        if self.kind in (*REDUCING, *SCATTERING):
            # Average is the default.
            options: dict[str, Any] = {} if self.op is ReduceOp.AVERAGE and self.seed % 2 else {"op": self.op}
            if (self.prescale, self.postscale) != (1, 1):
                options |= {"prescale_factor": self.prescale, "postscale_factor": self.postscale}
            return call(subject, name=name, process_set=where, **options)
        if self.kind == "alltoall":
            return call(subject, self.given_splits(hvd.rank(), ranks), name=name, process_set=where)
        if self.kind.startswith("broadcast"):
            return call(subject, self.root(ranks), name=name, process_set=where)
        return call(subject, name=name, process_set=where)

    def expected(self, rank: int, ranks: Sequence[int]) -> list[Tensor]:
        """What must come out on `rank`, by definition."""
        everybody = [self.inputs(each, ranks) for each in ranks]
        columns = [list(column) for column in zip(*everybody, strict=True)]
        place = list(ranks).index(rank)
        if self.kind in (*REDUCING, *SCATTERING):
            if self.op is ReduceOp.ADASUM:
                return [adasum(column).to(column[0].dtype) for column in columns]
            totals = [reduced(self.op, column, self.prescale, self.postscale) for column in columns]
            return totals if self.kind in REDUCING else [_share(each, place, len(ranks)) for each in totals]
        if self.kind in GATHERING:
            return [torch.cat([torch.atleast_1d(each) for each in column]) for column in columns]
        if self.kind == "alltoall":
            counts = [self.splits(each, ranks) for each in ranks]
            starts = [sum(row[:place]) for row in counts]
            parts = [
                rows[start : start + row[place]] for rows, start, row in zip(columns[0], starts, counts, strict=True)
            ]
            given = self.given_splits(rank, ranks)
            if given is None and self.waits:
                return [torch.cat(parts)]
            dtype = given.dtype if isinstance(given, Tensor) else torch.int32
            return [torch.cat(parts), torch.tensor([row[place] for row in counts], dtype=dtype)]
        return everybody[list(ranks).index(self.root(ranks))]

    def check(self, result: Any, tensors: list[Tensor], rank: int, ranks: Sequence[int]) -> None:
        """The result is right; the input was written, or left alone, as the call says."""
        results = list(result) if isinstance(result, (list, tuple)) else [result]
        for got, wanted in zip(results, self.expected(rank, ranks), strict=True):
            if self.op is ReduceOp.ADASUM and self.kind in REDUCING:
                # Whole numbers go in, but the factors are none: what is left after they cancel is rounded.
                tolerance = max(1e-12, 16 * torch.finfo(got.dtype).eps)
                torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)
            else:
                same(got, wanted)
        if self.in_place:
            assert all(each.grad_fn is None for each in tensors)
            assert all(got is mine for got, mine in zip(results, tensors, strict=True))
            if not self.in_shared_memory:
                before = [each.stride() for each in self.given(rank, ranks)]
                assert [each.stride() for each in tensors] == before
                assert all(untouched_beside(each, each.detach()) for each in tensors)
        else:
            assert all(torch.equal(a, b) for a, b in zip(tensors, self.inputs(rank, ranks), strict=True))
            assert all(got.data_ptr() != tensors[0].data_ptr() for got in results if got.numel())


def _share(total: Tensor, place: int, size: int) -> Tensor:
    """Rows of `place` when the first ranks hold one more."""
    rows, longer = divmod(len(total), size)
    start = place * rows + min(place, longer)
    return total[start : start + rows + (place < longer)]
