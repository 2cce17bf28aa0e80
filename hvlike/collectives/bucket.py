"""A bucket of a plan: tensors that are reduced by one job, compressed on the way where that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvlike.collectives.bucket_exchange import BucketExchange, Packers
from hvlike.collectives.bucket_packer import BucketPacker
from hvlike.collectives.compression import (
    CastCompressor,
    Compression,
    CompressorLike,
    NoneCompressor,
    StatefulCompressor,
)
from hvlike.collectives.operand import Operand
from hvlike.collectives.picking import pick
from hvlike.collectives.reductions import arithmetic_of
from hvlike.planes.adasum import Adasum
from hvlike.planes.arithmetic import Arithmetic
from hvlike.planes.cuda.jobs import home_of, in_host_memory
from hvlike.planes.lane import Job
from hvlike.planes.ops import ReduceOp, op_name
from hvlike.planes.packing import Packer
from hvlike.planes.plane import Plane
from hvlike.transport.routine import Routine

Part = tuple[Callable[[Sequence[Any]], tuple[Any, ...]], BucketPacker]
"""Chooses the tensors of one dtype from a bucket, and reduces them."""


@dataclass(frozen=True)
class Settings:
    """What is done to every tensor of a planned reduction."""

    op: ReduceOp
    size: int
    prescale: float
    postscale: float
    compression: CompressorLike

    def arithmetic(self, dtype: torch.dtype) -> Arithmetic:
        """The arithmetic for tensors of this dtype."""
        return arithmetic_of(dtype, self.op, self.size, self.prescale, self.postscale)

    @property
    def compresses(self) -> bool:
        """True when the tensors travel in another form."""
        return self.compression is not Compression.none

    @property
    def memory(self) -> StatefulCompressor | None:
        """The compressor, where it remembers something from step to step."""
        return self.compression if isinstance(self.compression, StatefulCompressor) else None

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype | None:
        """What tensors of this dtype travel as, element by element; None where the compressor alone knows."""
        if type(self.compression) is CastCompressor:
            return self.compression.cast(dtype)
        return None if self.compresses else dtype

    @property
    def is_trivial(self) -> bool:
        """True when a single rank has nothing to do."""
        return self.prescale * self.postscale == 1

    @property
    def is_portable(self) -> bool:
        """True when a rank that has no such reduction can take part in it for one that has joined."""
        return isinstance(self.compression, (NoneCompressor, CastCompressor))

    def describe(self) -> tuple[Any, ...]:
        """What must be equal on all ranks, as plain values."""
        return (op_name(self.op), self.prescale, self.postscale, repr(self.compression))


class Bucket:
    """Some entries of a plan and what is kept for them from step to step."""

    def __init__(
        self,
        entries: Sequence[int],
        strides: Sequence[tuple[int, ...] | None],
        dtypes: Sequence[torch.dtype],
        settings: Settings,
        names: Sequence[str] = (),
        rank: int = 0,
    ) -> None:
        """strides, dtypes, names: of each entry of the plan; strides are the agreed order in memory.

        rank: the place of this rank in the process set. Names and rank are what a stateful compressor remembers by.
        """
        self.entries = tuple(entries)
        self.pick = pick(self.entries)
        """The tensors of this bucket from those of all entries."""
        self._names = [names[index] for index in entries] if names else []
        self._rank = rank
        self._strides = [strides[index] for index in entries]
        self._settings = settings
        self._packers: Packers = {}
        self._parts = self._same_dtypes([dtypes[index] for index in entries])

    @property
    def is_plain(self) -> bool:
        """No compressor with a life of its own, no Adasum: one step into the job nothing but copies has begun."""
        return self._parts is not None

    def job(self, tensors: Sequence[torch.Tensor]) -> Job:
        """The job that reduces these tensors, one for each entry, in place."""

        def run(plane: Plane) -> Routine[None]:
            if self._parts is not None:
                for places, packer in self._parts:
                    yield from packer.allreduce(plane, places(tensors))
            elif self._settings.memory is not None:
                originals = [tensor.detach() for tensor in tensors]
                yield from self._settings.memory.reduce(self._names, originals, self._exchange(plane))
            else:
                yield from self._compress(plane, [tensor.detach() for tensor in tensors])

        return run

    def _same_dtypes(self, dtypes: Sequence[torch.dtype]) -> list[Part] | None:
        """What travels together, where each element travels as itself or cast; None where it takes more than that."""
        settings = self._settings
        wires = [settings.wire_dtype(dtype) for dtype in dtypes]
        if settings.op is ReduceOp.ADASUM or settings.memory is not None:
            return None
        parts: list[Part] = []
        for wire in dict.fromkeys(wires):
            if wire is None:
                return None
            places = [place for place, each in enumerate(wires) if each is wire]
            casts = any(dtypes[place] is not wire for place in places)
            strides = [self._strides[place] for place in places]
            packer = BucketPacker(strides, settings.arithmetic(wire), casts=casts)
            parts.append((pick(places), packer))
        return parts

    def _compress(self, plane: Plane, originals: Sequence[torch.Tensor]) -> Routine[None]:
        """Reduce what the compressor makes of the tensors, or their Adasum."""
        compression = self._settings.compression
        pairs = [compression.compress(tensor) for tensor in originals]
        work = [pair[0] for pair in pairs]
        home = home_of(plane)
        operands = [Operand(tensor, strides, home=home) for tensor, strides in zip(work, self._strides, strict=True)]
        yield from self._reduce(plane, [operand.flat for operand in operands])
        for operand in operands:
            operand.write_back()
        for original, reduced, (_, context) in zip(originals, work, pairs, strict=True):
            restored = compression.decompress(reduced, context)
            if restored is not original:
                original.copy_(restored)

    def _reduce(self, plane: Plane, flats: Sequence[torch.Tensor]) -> Routine[None]:
        """A compressor may choose a dtype for each tensor; every dtype is a reduction of its own."""
        settings = self._settings
        for dtype in dict.fromkeys(flat.dtype for flat in flats):
            same = [flat for flat in flats if flat.dtype is dtype]
            if settings.op is ReduceOp.ADASUM:
                whole = Adasum(self._rank, settings.size, settings.prescale, settings.postscale)
                yield from in_host_memory(plane, same, whole.allreduce)
                continue
            packer = self._packers.setdefault((dtype, ()), Packer())
            yield from packer.allreduce(plane, same, settings.arithmetic(dtype))

    def _exchange(self, plane: Plane) -> BucketExchange:
        settings = self._settings
        factor = settings.prescale * settings.postscale / (settings.size if settings.op is ReduceOp.AVERAGE else 1)
        return BucketExchange(plane, (self._rank, settings.size), factor, settings.arithmetic, self._packers)
