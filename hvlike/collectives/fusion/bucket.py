"""A bucket: tensors that are reduced together in every step, in one buffer per dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from hvlike.backends.adasum import Adasum
from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.arithmetic.reduce_op import ReduceOp, op_name
from hvlike.backends.base import Backend, Prepared
from hvlike.backends.cuda.device_jobs import home_of, in_host_memory
from hvlike.backends.fusion_buffer import FusionBuffer
from hvlike.backends.op_queue import Job
from hvlike.collectives.compression import (
    CastCompressor,
    Compression,
    CompressorLike,
    NoneCompressor,
    StatefulCompressor,
)
from hvlike.collectives.compression.stateful import Exchange, Packers
from hvlike.collectives.fusion.bucket_packer import BucketPacker, pick
from hvlike.collectives.requests.reduction import Operand, arithmetic_of, reduce_operands
from hvlike.transport.loop.coroutine import Coroutine


class PlannedPart(NamedTuple):
    """The tensors of one bucket and dtype, where they are reduced as they lie in host memory."""

    pick: Callable[[Sequence[Any]], Sequence[Any]]
    """Chooses them from those of all entries."""
    fits: Callable[[Sequence[torch.Tensor]], bool]
    reduction: Prepared


Part = tuple[Callable[[Sequence[Any]], tuple[Any, ...]], BucketPacker]
"""Chooses the tensors of one dtype from a bucket, and reduces them."""


@dataclass(frozen=True)
class ReductionSettings:
    op: ReduceOp
    size: int
    prescale: float
    postscale: float
    compression: CompressorLike

    def arithmetic(self, dtype: torch.dtype) -> Arithmetic:
        return arithmetic_of(dtype, self.op, self.size, self.prescale, self.postscale)

    @property
    def compresses(self) -> bool:
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
        settings: ReductionSettings,
        names: Sequence[str] = (),
        rank: int = 0,
    ) -> None:
        """strides, dtypes, names: of each entry. A stateful compressor remembers by names and rank."""
        self.entries = tuple(entries)
        self.pick = pick(self.entries)
        self._names = [names[index] for index in entries] if names else []
        self._rank = rank
        self._strides = [strides[index] for index in entries]
        self._settings = settings
        self._packers: Packers = {}
        self._parts = self._same_dtypes([dtypes[index] for index in entries])
        self.active = 0
        """How many ranks were active in the last run, where it `counts`."""

    @property
    def is_plain(self) -> bool:
        """No compressor with a life of its own, no Adasum: one step into the job nothing but copies has begun."""
        return self._parts is not None

    def prepared(self) -> list[PlannedPart] | None:
        """What reduces the tensors as they are, by dtype; None where that is not the way, or nothing has run yet."""
        if self._parts is None:
            return None
        found = []
        for places, packer in self._parts:
            reduction = packer.prepared
            if reduction is None:
                return None
            found.append(PlannedPart(pick(places(self.entries)), packer.fits, reduction))
        return found

    def counts(self, backend: Backend, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the reduction of these tensors counts the active ranks by itself; the same on every rank."""
        if not self._parts:
            return False
        places, packer = self._parts[0]
        return packer.prepare(backend, places(tensors))

    def job(self, tensors: Sequence[torch.Tensor], *, active: bool) -> Job:
        """The job that reduces these tensors, one for each entry, in place; active: they are this rank's own."""

        def run(backend: Backend) -> Coroutine[None]:
            if self._parts is not None:
                for number, (places, packer) in enumerate(self._parts):
                    count = yield from packer.allreduce(backend, places(tensors), active=active)
                    self.active = self.active if number else count
            elif self._settings.memory is not None:
                originals = [tensor.detach() for tensor in tensors]
                yield from self._settings.memory.reduce(self._names, originals, self._exchange(backend))
            else:
                yield from self._compress(backend, [tensor.detach() for tensor in tensors])

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

    def _compress(self, backend: Backend, originals: Sequence[torch.Tensor]) -> Coroutine[None]:
        """Reduce what the compressor makes of the tensors, or their Adasum."""
        compression = self._settings.compression
        pairs = [compression.compress(tensor) for tensor in originals]
        work = [pair[0] for pair in pairs]
        home = home_of(backend)
        operands = [Operand(tensor, strides, home=home) for tensor, strides in zip(work, self._strides, strict=True)]
        yield from reduce_operands(operands, partial(self._reduce, backend))
        for original, reduced, (_, context) in zip(originals, work, pairs, strict=True):
            restored = compression.decompress(reduced, context)
            if restored is not original:
                original.copy_(restored)

    def _reduce(self, backend: Backend, dtype: torch.dtype, flats: list[torch.Tensor]) -> Coroutine[None]:
        settings = self._settings
        if settings.op is ReduceOp.ADASUM:
            whole = Adasum(self._rank, settings.size, settings.prescale, settings.postscale)
            return in_host_memory(backend, flats, whole.allreduce)
        packer = self._packers.setdefault((dtype, ()), FusionBuffer())
        return packer.allreduce(backend, flats, settings.arithmetic(dtype))

    def _exchange(self, backend: Backend) -> Exchange:
        settings = self._settings
        factor = settings.prescale * settings.postscale / (settings.size if settings.op is ReduceOp.AVERAGE else 1)
        return Exchange(backend, (self._rank, settings.size), factor, settings.arithmetic, self._packers)
