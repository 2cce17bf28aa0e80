"""Element-wise arithmetic on flat pieces of tensors, in cache: what every host backend reduces with."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from hvlike.backends.arithmetic.kernels import (
    BLOCK_BYTES,
    ArrayKernel,
    DirectKernel,
    Factors,
    FloatKernel,
    HalfKernel,
    IntegerKernel,
    KernelCall,
    direct_contributions,
    threaded_kernel,
)
from hvlike.backends.arithmetic.reduce_op import AnyOp, ReduceOp, check_supported, op_name
from hvlike.errors import UsageError
from hvlike.transport.memory.dtypes import Array, Kind, dtype_name, element_of, storage_view

THREADED_BYTES = 2 << 20  # Pieces below are added by the calling thread


class Threads:
    """How many threads may add in this process."""

    def __init__(self) -> None:
        self.cores = 1.0  # Of this rank; init() sets it

    def usable(self) -> int:
        """Threads for the additions of the calling thread. 1 where torch is set to more than the rank has cores, and 1
        beside the main thread: that one computes meanwhile, with all of them.
        """
        threads = torch.get_num_threads()
        if 1 < threads <= self.cores and threading.current_thread() is threading.main_thread():
            return threads
        return 1


THREADS = Threads()


Piece: TypeAlias = Array | torch.Tensor  # A flat run of elements as the kernel sees it: tensors for the 16-bit floats

_KERNELS: dict[Kind, type[ArrayKernel | HalfKernel]] = {
    Kind.BOOL: ArrayKernel,
    Kind.INTEGER: IntegerKernel,
    Kind.HALF: HalfKernel,
    Kind.FLOAT: FloatKernel,
    Kind.COMPLEX: FloatKernel,
}


class ChunkKernels(NamedTuple):
    """What a reduction of chunks is made of. Its caller silences numpy."""

    gather: Callable[..., Any]  # (pieces, out=piece): copy pieces one after the other; returns `out`
    join: Callable[[int, Any, Sequence[Any]], None]
    """(rank, own, copies): reduce the own piece and the peers' copies, in the order of the ranks. The result is in
    `own`, and in the first copy for the peers to take."""
    deliver: Callable[[Any, Any], None] | None
    """(target, source): how a peer takes the result. None: it multiplies with `factor`, or copies."""
    factor: Any


class Arithmetic:
    """One reduction of one dtype with its factors: result = postscale / divisor * reduce(prescale * each).

    `prescale` applies to every contribution before the op, so a product carries it once per contribution and a
    negative one turns a minimum. Floats are multiplied by one factor postscale / divisor, in float32 for
    float16, bfloat16, float32 and complex64. Integers: each scaling goes through double and truncates toward zero;
    with postscale 1 the division is exact. Min and Max of floats propagate NaN. Overflow is silent, as in torch.

    A reduction that goes on elsewhere (on another node) is combined partially here, by `continuation` there. Partial
    results of float16 and bfloat16 carry the power of two in postscale / divisor already: a sum that an average would
    divide later must not overflow float16 on its way.
    """

    def __init__(
        self, dtype: torch.dtype, op: AnyOp, *, divisor: int = 1, prescale: float = 1.0, postscale: float = 1.0
    ) -> None:
        """Raises: UsageError when `op` is not defined on `dtype` or not element-wise (Adasum), when a factor is
        given for bool, when a factor of an integer reduction is not finite, or when the divisor is below 1.
        """
        check_supported(op, dtype)
        factors = Factors(float(prescale), float(postscale), divisor)
        _check_factors(dtype, op, factors)
        self.dtype = dtype
        self.op = op
        self.factors = factors
        self.element = element_of(dtype)
        self.itemsize = self.element.itemsize
        kernel: Any = _KERNELS[self.element.kind](self.element, op, factors)
        self._kernel = self._direct = kernel
        self.over: Callable[[Array], Piece] = kernel.over
        """(buffer): view raw memory (1-D, aligned, a whole number of elements) as a piece, without a copy."""
        self.copy: Callable[[Piece, Piece], None] = kernel.copy
        self.accumulator: Callable[[int], Piece | None] = kernel.accumulator
        """(length): memory in which a reduction of up to so many elements can go on between calls, if it needs any."""
        self._is_array = self.element.kind is not Kind.HALF
        self._direct_contributions = -1
        if self.element.kind is Kind.HALF:
            self._direct = DirectKernel(self.element, op, factors)
            self._direct_contributions = direct_contributions(dtype, op, factors)
        self.joining: Any = kernel if isinstance(kernel, ArrayKernel) and factors.prescale == 1 else None
        """The kernel, where a sum can be scaled while it is copied, a pass less; its caller silences numpy."""
        self._block = BLOCK_BYTES // self.itemsize
        self._large = THREADED_BYTES // self.itemsize
        self._threaded = threaded_kernel(self.element, op, factors) if self._is_array else None
        self._widening = None if self._is_array else kernel
        self._is_plain = factors == Factors(1.0, 1.0, 1)
        self._early = early_factor(op, factors.post) if self.element.kind is Kind.HALF else 1.0

    @functools.cached_property
    def continuation(self) -> Arithmetic:
        """What is left to do with partial results."""
        factors = self.factors
        if factors.prescale == 1 and self._early == 1:
            return self
        return Arithmetic(self.dtype, self.op, divisor=factors.divisor, postscale=factors.postscale / self._early)

    def on(self, dtype: torch.dtype) -> Arithmetic:
        factors = self.factors
        return Arithmetic(
            dtype, self.op, divisor=factors.divisor, prescale=factors.prescale, postscale=factors.postscale
        )

    def stamp(self, lengths: Sequence[int]) -> int:
        """A number of 64 bits for the reduction of tensors of these lengths, the same on every rank."""
        factors = self.factors
        described = (*lengths, self.op, factors.prescale, factors.postscale, factors.divisor)
        return hash((zlib.crc32(str(self.dtype).encode()), *described)) & 0xFFFFFFFFFFFFFFFF

    def view(self, tensor: torch.Tensor) -> Piece:
        """View a contiguous CPU tensor as a piece, which keeps its memory. Raises: UsageError if that cannot be."""
        if tensor.dtype is not self.dtype:
            raise UsageError(f"expected a tensor of {dtype_name(self.dtype)}, got {dtype_name(tensor.dtype)}.")
        if self._is_array and tensor.dim() == 1 and not tensor.requires_grad and tensor.is_contiguous():
            # Once for every gradient and step: the shortest way for what nearly all of them are.
            with contextlib.suppress(TypeError, RuntimeError):
                array: Array = tensor.numpy()
                return array
        return self.over(storage_view(tensor))

    def address(self, tensor: torch.Tensor) -> int:
        """Where a contiguous CPU tensor of this dtype begins. Raises: UsageError as `view` does."""
        if tensor.dtype is not self.dtype or tensor.is_neg() or tensor.is_conj():
            self.view(tensor)
        return tensor.data_ptr()

    def steps(self, *, partial: bool = False) -> ChunkKernels:
        """What a reduction of chunks is made of; partial: `continuation` goes on with its results."""
        gather = np.concatenate if self._is_array else torch.cat
        kernel = self.joining
        if partial:
            return ChunkKernels(gather, functools.partial(self._join, partial=True), self.copy, None)
        if kernel is None:
            return ChunkKernels(gather, self._join, None, None)
        plain = kernel.copies or kernel.factor is not None
        return ChunkKernels(gather, kernel.join, None if plain else kernel.deliver, kernel.factor)

    def _join(self, rank: int, own: Piece, copies: Sequence[Piece], *, partial: bool = False) -> None:
        """In the order of the ranks, on whichever rank; then a sum does not depend on how the work was cut and dealt,
        and a run that is resumed or bucketed otherwise gives the same bits. The first two may be swapped.
        """
        if rank > 1:
            self.combine(copies[0], [*copies[1:rank], own, *copies[rank:]], [own], partial=partial)
        else:
            self.combine(own, copies, () if partial else copies[:1], partial=partial)

    def combine(
        self, own: Piece, others: Sequence[Piece], outputs: Sequence[Piece] = (), *, partial: bool = False
    ) -> None:
        """Reduce `own` and `others`, apply all factors, leave the result in `own` and copy it to `outputs`.

        All pieces have the length of `own`. An output may be one of the others: it is written after all were
        read. `others` that are no outputs are left as they are. The order of `others` is the order of the sum.
        partial: do the first half only; `continuation` goes on with the result.
        """
        kernel = self._direct if len(others) <= self._direct_contributions and not partial else self._kernel
        length, size = len(own), self._block
        if length >= self._large:
            kernel, size, (own, *pieces) = self._share_out(kernel, [own, *others, *outputs])
            others, outputs = pieces[: len(others)], pieces[len(others) :]
        # In one pass there is nothing to find in the cache again.
        one_pass = self._is_plain and len(others) == 1 and not outputs and kernel is not self._widening
        with np.errstate(all="ignore"):
            if length <= size or one_pass:
                self._combine(kernel, own, others, outputs, partial)
                return
            for block in _blocks(length, size):
                parts, results = [each[block] for each in others], [each[block] for each in outputs]
                self._combine(kernel, own[block], parts, results, partial)

    def _combine(
        self, kernel: Any, own: Piece, others: Sequence[Piece], outputs: Sequence[Piece], partial: bool
    ) -> None:
        accumulator = kernel.load(own, None)
        for other in others:
            kernel.fold(accumulator, other)
        if not partial:
            kernel.finish(accumulator)
        elif self._early != 1:
            accumulator.mul_(self._early)
        kernel.store(accumulator, own)
        for output in outputs:
            kernel.copy(output, own)

    def calls(self, copies: Sequence[Piece], own: Piece) -> list[KernelCall]:
        """What to call for `reduce_copies`, made once for the same memory; the caller silences numpy."""
        known: list[KernelCall] | None = None if self.joining is None else self.joining.calls(copies, own)
        return [(self.reduce_copies, (copies, own), {})] if known is None else known

    def reduce_copies(self, copies: Sequence[Piece], own: Piece) -> None:
        """Reduce two or more pieces in this order into `own`, which is none of them; the caller silences numpy."""
        self.copy(own, copies[0])
        self.combine(own, copies[1:])

    def begin(self, own: Piece, memory: Piece | None) -> Piece:
        """Start a reduction that goes on between calls: return its accumulator, holding the own contribution."""
        with np.errstate(all="ignore"):
            accumulator: Piece = self._kernel.load(own, memory)
        return accumulator

    def fold(self, accumulator: Piece, other: Piece) -> None:
        kernel, size = self._kernel, self._block
        if len(other) >= self._large:
            kernel, size, (accumulator, other) = self._share_out(kernel, [accumulator, other])
        with np.errstate(all="ignore"):
            for block in _blocks(len(other), size):
                kernel.fold(accumulator[block], other[block])

    def merge(self, accumulator: Piece, other: Piece) -> None:
        """Reduce another accumulator into this one."""
        with np.errstate(all="ignore"):
            self._kernel.merge(accumulator, other)

    def end(self, accumulator: Piece, own: Piece) -> None:
        """Apply divisor and postscale, and write the result to `own`, rounded once."""
        kernel, size = self._kernel, self._block
        if len(own) >= self._large:
            kernel, size, (accumulator, own) = self._share_out(kernel, [accumulator, own])
        with np.errstate(all="ignore"):
            for block in _blocks(len(own), size):
                kernel.finish(accumulator[block])
                kernel.store(accumulator[block], own[block])

    def _share_out(self, kernel: Any, pieces: list[Piece]) -> tuple[Any, int, list[Piece]]:
        """The kernel, the elements of a block, and large pieces as that kernel takes them: for one thread or more."""
        threads = THREADS.usable()
        if threads == 1:
            return kernel, self._block, pieces
        if not self._is_array:
            return kernel, threads * self._block, pieces
        if self._threaded is None:
            return kernel, self._block, pieces
        tensors: list[Piece] = [torch.from_numpy(piece) for piece in pieces]
        return self._threaded, threads * self._block, tensors


def _blocks(length: int, size: int) -> Iterator[slice]:
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def early_factor(op: AnyOp, post: float) -> float:
    """The part of a factor below 1 that partial results carry: a power of two, so it rounds nothing (1/4 for 1/3); 1
    for products, which are not linear.
    """
    if op is ReduceOp.PRODUCT or not 0 < abs(post) < 1:
        return 1.0
    return 2.0 ** math.floor(math.log2(abs(post)))


def _check_factors(dtype: torch.dtype, op: AnyOp, factors: Factors) -> None:
    if op is ReduceOp.ADASUM:
        raise UsageError("Adasum is not an element-wise reduction and cannot be used here. Use Average or Sum.")
    if factors.divisor < 1:
        raise UsageError(f"expected a divisor of at least 1, got {factors.divisor}.")
    kind = element_of(dtype).kind
    plain = factors.prescale == 1 and factors.postscale == 1
    if kind is Kind.BOOL and not (plain and factors.divisor == 1):
        raise UsageError(
            f"op {op_name(op)} on bool takes no factors, got prescale {factors.prescale}, postscale "
            f"{factors.postscale}, divisor {factors.divisor}; convert the tensor to a number first."
        )
    if kind is Kind.INTEGER and not (math.isfinite(factors.prescale) and math.isfinite(factors.postscale)):
        raise UsageError(
            f"expected finite factors for {dtype_name(dtype)}, got prescale {factors.prescale} and postscale "
            f"{factors.postscale}."
        )
