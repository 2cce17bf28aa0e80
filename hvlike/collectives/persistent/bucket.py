"""A bucket: tensors that are reduced together in every step, in one buffer per dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple

import torch

from hvlike.backends.adasum import Adasum
from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.arithmetic.reduce_op import ReduceOp, op_name
from hvlike.backends.base import Backend, PreparedReduction, phase
from hvlike.backends.cuda.device_backend import home_of, in_host_memory
from hvlike.backends.fusion_buffer import CastReduction, FusedViews, FusionBuffer
from hvlike.collectives.compression import (
    CastCompressor,
    Compression,
    CompressorLike,
    NoneCompressor,
    describe_compressor,
)
from hvlike.collectives.requests.reduction import Operand, arithmetic_of, is_dense, reduce_operands, row_by_row
from hvlike.errors import MismatchError
from hvlike.transport.loop.coroutine import Coroutine
from hvlike.transport.memory.dtypes import dtype_name


def pick(indices: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return a function that gives these items of a list, as a tuple: pick([2, 0])("abc") -> ("c", "a")."""
    if len(indices) > 1:
        return itemgetter(*indices)
    return lambda items: tuple(items[index] for index in indices)


Strides = tuple[int, ...] | None
ActiveJob = Callable[[Backend, int | None], Coroutine[int]]  # With what a rank says of itself; returns the sum of all
_shape: Callable[[torch.Tensor], torch.Size] = attrgetter("shape")
_dtype: Callable[[torch.Tensor], torch.dtype] = attrgetter("dtype")
_nbytes: Callable[[torch.Tensor], int] = attrgetter("nbytes")
_layout: Callable[[torch.Tensor], torch.layout] = attrgetter("layout")
_device: Callable[[torch.Tensor], torch.device] = attrgetter("device")
_on_host: Callable[[torch.Tensor], bool] = attrgetter("is_cpu")
_by_rows, _stride, _address = torch.Tensor.is_contiguous, torch.Tensor.stride, torch.Tensor.data_ptr
_is_negative, _is_conjugate = torch.Tensor.is_neg, torch.Tensor.is_conj


class BucketPacker:
    """Reduces one list of tensors over and over, all in one dtype. Used in the loop.

    Memory: a copy of each tensor that cannot be reduced in place (another dtype or order of elements than agreed), and
    what the backend has prepared.
    """

    def __init__(
        self,
        strides: Sequence[Strides],
        arithmetic: Arithmetic,
        dtypes: Sequence[torch.dtype] | None = None,
        *,
        exact: bool = False,
    ) -> None:
        """strides: agreed for each tensor, None for row by row. dtypes: of each, where some are not that of the
        reduction. exact: refuse a tensor of another dtype, which would be rounded.
        """
        self._agreed = list(strides)
        self._arithmetic = arithmetic
        self._dtypes = [arithmetic.dtype] * len(self._agreed) if dtypes is None else list(dtypes)
        self._exact = exact
        self._casts = any(each is not arithmetic.dtype for each in self._dtypes)
        self._reduction: PreparedReduction | None = None
        self._pick_rows = self._pick_ordered = pick([])
        self._orders: list[Strides] = []
        self._sizes: list[int] = []
        self._home: torch.device | None = None
        self._shapes: list[torch.Size] | None = None
        self._strides: list[Strides] = []
        self._filled: list[int] = []

    def in_memory(self, tensors: Sequence[torch.Tensor]) -> ActiveJob | None:
        """The job for these tensors where they are reduced as they are; None where one has to be looked at."""
        reduction = self._reduction
        if reduction is None or len(self._filled) < len(tensors) or not self.fits(tensors):
            return None
        addresses, run = list(map(_address, tensors)), reduction.run
        return (lambda backend, active: run(addresses, active, tensors)) if all(addresses) else None

    def allreduce(self, backend: Backend, tensors: Sequence[torch.Tensor], *, active: int | None) -> Coroutine[int]:
        """Reduce dense tensors in place; the same shapes, and the same backend every time, on every rank.

        active, and what it returns: as PreparedReduction.run.
        """
        shapes = list(map(_shape, tensors))
        if shapes != self._shapes:
            self._lay_out(shapes, backend)
        reduction, filled = self._reduction, [tensors[index] for index in self._filled]
        if reduction is None:
            return 0 if active is None else (yield from backend.count_active(active))
        operands: list[Operand] = []
        if not self.fits(tensors):
            if self._exact:
                self._check_dtypes(tensors)
            dtype, home = self._arithmetic.dtype, self._home
            operands = [Operand(tensors[index], self._strides[index], dtype, home) for index in self._filled]
            filled = [operand.work for operand in operands]
        with phase(backend, f"{backend.name}_ALLREDUCE", filled):
            count = yield from reduction.run(list(map(_address, filled)), active, filled)
        for operand in operands:
            operand.write_back()
        return count

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether all lie where the backend has its tensors, as agreed. Asked in every step: no Python for each."""
        arithmetic, home = self._arithmetic, self._home
        return (
            all(map(is_, map(_layout, tensors), repeat(torch.strided)))
            and all(map(is_, map(_dtype, tensors), self._dtypes))
            and list(map(_nbytes, tensors)) == self._sizes
            and (all(map(_on_host, tensors)) if home is None else list(map(_device, tensors)) == [home] * len(tensors))
            and all(map(_by_rows, self._pick_rows(tensors)))
            and list(map(_stride, self._pick_ordered(tensors))) == self._orders
            and not any(map(_is_negative, tensors))
            and not (arithmetic.dtype.is_complex and any(map(_is_conjugate, tensors)))
        )

    def _check_dtypes(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor, dtype in zip(tensors, self._dtypes, strict=True):
            if tensor.dtype is not dtype:
                raise MismatchError(
                    f"a gradient of {dtype_name(tensor.dtype)} has come where the ranks have agreed on "
                    f"{dtype_name(dtype)}: its dtype has changed since the step before. Change grad_dtype of a "
                    "parameter before the optimizer, or the DistributedDataParallel, is made, on every rank."
                )

    def _lay_out(self, shapes: list[torch.Size], backend: Backend) -> None:
        self._shapes, self._home = shapes, home_of(backend)
        # A parameter may have got another shape since its order was agreed on.
        self._strides = [
            strides if strides and len(shape) == len(strides) and is_dense(shape, strides) else None
            for shape, strides in zip(shapes, self._agreed, strict=True)
        ]
        ordered = [index for index, strides in enumerate(self._strides) if strides is not None]
        self._pick_rows = pick([index for index, strides in enumerate(self._strides) if strides is None])
        self._pick_ordered = pick(ordered)
        self._orders = [self._strides[index] for index in ordered]
        lengths = [shape.numel() for shape in shapes]
        self._sizes = [length * dtype.itemsize for length, dtype in zip(lengths, self._dtypes, strict=True)]
        self._filled = [index for index, length in enumerate(lengths) if length]
        self._reduction = self._prepare(lengths, backend)

    def _prepare(self, lengths: Sequence[int], backend: Backend) -> PreparedReduction | None:
        filled = self._filled
        if not filled:
            return None
        if not self._casts:
            return backend.prepare([lengths[index] for index in filled], self._arithmetic)
        assert self._shapes is not None
        total = sum(lengths)
        prepared = backend.prepare([total], self._arithmetic)
        shapes = [self._shapes[index] for index in filled]
        strides = [self._strides[index] or row_by_row(self._shapes[index]) for index in filled]
        with torch.inference_mode(False):
            buffer = torch.empty(total, dtype=self._arithmetic.dtype, device=self._home or "cpu")
            return CastReduction(prepared, buffer, FusedViews(buffer, shapes, strides))


class Part(NamedTuple):
    """What travels together of a bucket: the tensors of one dtype."""

    pick: Callable[[Any], Sequence[torch.Tensor]]  # Chooses them from those of all entries
    packer: BucketPacker


@dataclass(frozen=True)
class ReductionSettings:
    op: ReduceOp
    size: int
    prescale: float = 1.0
    postscale: float = 1.0
    compression: CompressorLike = Compression.none

    def arithmetic(self, dtype: torch.dtype) -> Arithmetic:
        return arithmetic_of(dtype, self.op, self.size, self.prescale, self.postscale)

    @property
    def compresses(self) -> bool:
        return self.compression is not Compression.none

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype | None:
        """What tensors of this dtype travel as, element by element; None where the compressor alone knows."""
        if type(self.compression) is CastCompressor:
            return self.compression.cast(dtype)
        return None if self.compresses else dtype

    @property
    def factor(self) -> float:
        """What a plain sum over the ranks is to be multiplied by."""
        return self.prescale * self.postscale / (self.size if self.op is ReduceOp.AVERAGE else 1)

    @property
    def is_portable(self) -> bool:
        """True when a rank that has no such reduction can take part in it for one that has joined."""
        return isinstance(self.compression, (NoneCompressor, CastCompressor))

    def describe(self) -> tuple[Any, ...]:
        """What must be equal on all ranks, as plain values."""
        return (op_name(self.op), self.prescale, self.postscale, describe_compressor(self.compression))


class Bucket:
    def __init__(
        self,
        entries: Sequence[int],
        strides: Sequence[tuple[int, ...] | None],
        dtypes: Sequence[torch.dtype],
        settings: ReductionSettings,
        rank: int = 0,
    ) -> None:
        """strides, dtypes: of each entry. rank: among those that reduce, for Adasum."""
        self.entries = tuple(entries)
        self.pick = pick(self.entries)
        self._rank = rank
        self._strides = [strides[index] for index in entries]
        self._settings = settings
        self._packers: dict[torch.dtype, FusionBuffer] = {}
        self.parts = self._same_dtypes([dtypes[index] for index in entries])

    @property
    def is_plain(self) -> bool:
        """No compressor with a life of its own, no Adasum: one step into the job nothing but copies has begun."""
        return self.parts is not None

    def job(self, tensors: Any) -> ActiveJob:
        """The job that reduces any tensors, by entry of the plan, in place."""
        if self.parts is None:
            return partial(self._reduce_closely, self.pick(tensors))
        return partial(self._reduce_parts, [(part.packer, part.pick(tensors)) for part in self.parts])

    def _reduce_parts(
        self, parts: Sequence[tuple[BucketPacker, Sequence[torch.Tensor]]], backend: Backend, active: int | None
    ) -> Coroutine[int]:
        for packer, tensors in parts[:-1]:
            yield from packer.allreduce(backend, tensors, active=None)
        packer, tensors = parts[-1]
        return (yield from packer.allreduce(backend, tensors, active=active))

    def _reduce_closely(self, tensors: Sequence[torch.Tensor], backend: Backend, active: int | None) -> Coroutine[int]:
        # First, so that a rank that fails in its job has been counted: the others end their step.
        count = 0 if active is None else (yield from backend.count_active(active))
        originals = [tensor.detach() for tensor in tensors]
        yield from self._compress(backend, originals)
        return count

    def _same_dtypes(self, dtypes: Sequence[torch.dtype]) -> list[Part] | None:
        """What travels together, where each element travels as itself or cast; None where it takes more than that."""
        settings = self._settings
        wires = [settings.wire_dtype(dtype) for dtype in dtypes]
        if settings.op is ReduceOp.ADASUM:
            return None
        parts: list[Part] = []
        for wire in dict.fromkeys(wires):
            if wire is None:
                return None
            places = [place for place, each in enumerate(wires) if each is wire]
            strides = [self._strides[place] for place in places]
            packer = BucketPacker(strides, settings.arithmetic(wire), [dtypes[place] for place in places], exact=True)
            parts.append(Part(pick([self.entries[place] for place in places]), packer))
        return parts

    def _compress(self, backend: Backend, originals: Sequence[torch.Tensor]) -> Coroutine[None]:
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
        packer = self._packers.setdefault(dtype, FusionBuffer())
        return packer.allreduce(backend, flats, settings.arithmetic(dtype))
