"""Element-wise kernels, one class per kind of number: load a contribution, fold others into it, store the result.

Each works on an accumulator. For the types that numpy computes the accumulator is the own piece itself. For the 16-bit
floats it is a float32 tensor, so that a sum is rounded once; where two contributions are added the result has the same
bits in place. numpy's add and copy are as fast as memcpy and cost half a microsecond less per call than torch's.

Scratch is allocated once per thread and reused for every block, so that it stays in the cache.
"""

from __future__ import annotations

import contextvars
import math
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch

from hvlike.backends.arithmetic.reduce_op import AnyOp, BitwiseOp, ReduceOp
from hvlike.transport.loop.coroutine import Coroutine
from hvlike.transport.memory.dtypes import Array, Element, Kind

T = TypeVar("T")
KernelCall: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]

BLOCK_BYTES = 1 << 18  # A piece is worked on in blocks of this size: its scratch stays in the second-level cache


def ordinary_tensor(array: Array, dtype: torch.dtype) -> torch.Tensor:
    """A tensor over the memory of `array` that may be written in and out of inference mode."""
    if not torch.is_inference_mode_enabled():
        return torch.from_numpy(array).view(dtype)
    with torch.inference_mode(False):
        return torch.from_numpy(array).view(dtype)


class Scratch(threading.local):
    """Named scratch arrays of the calling thread. Valid until the same name is asked for again."""

    def __init__(self) -> None:
        self._bytes: dict[str, Array] = {}
        self._wide: dict[str, torch.Tensor] = {}

    def array(self, name: str, dtype: np.dtype[Any], length: int) -> Array:
        size = length * dtype.itemsize
        buffer = self._bytes.get(name)
        if buffer is None or buffer.nbytes < size:
            buffer = self._bytes[name] = np.empty(max(size, BLOCK_BYTES), np.uint8)
        view: Array = buffer[:size].view(dtype)
        return view

    def wide(self, name: str, length: int) -> torch.Tensor:
        tensor = self._wide.get(name)
        if tensor is None or tensor.numel() < length:
            tensor = ordinary_tensor(np.empty(max(length, BLOCK_BYTES // 4), np.float32), torch.float32)
            self._wide[name] = tensor
        return tensor[:length]


SCRATCH = Scratch()


class SilentErrstate:
    """Runs functions in which numpy warns of nothing. One thread at a time, not nested.

    numpy (2.0 on) keeps what errstate sets in a context variable: a context in which it is set once serves for ever.
    """

    __slots__ = ("run",)

    def __init__(self) -> None:
        context = contextvars.copy_context()
        context.run(np.seterr, all="ignore")
        self.run = context.run  # Calls a function; what it sets in context variables is seen by later calls here only

    def drive(self, coroutine: Coroutine[T]) -> Coroutine[T]:
        """The same coroutine, each of whose steps runs so."""
        step = self.run
        try:
            while True:
                yield step(next, coroutine)
        except StopIteration as stop:
            result: T = stop.value
            return result
        except BaseException as error:
            coroutine.throw(error)
            raise


@dataclass(frozen=True)
class Factors:
    """What each contribution is multiplied with, and what the result is multiplied with and divided by."""

    prescale: float
    postscale: float
    divisor: int

    @property
    def post(self) -> float:
        return self.postscale / self.divisor


_FUNCTIONS: dict[AnyOp, str] = {
    ReduceOp.AVERAGE: "add",
    ReduceOp.SUM: "add",
    ReduceOp.MIN: "minimum",
    ReduceOp.MAX: "maximum",
    ReduceOp.PRODUCT: "multiply",
    BitwiseOp.BAND: "bitwise_and",
    BitwiseOp.BOR: "bitwise_or",
    BitwiseOp.BXOR: "bitwise_xor",
}


class Kernel:
    """Arithmetic on pieces of one dtype under one op. Pieces are flat, of equal length, and sliceable.

    over(buffer)               the typed piece over the bytes of a buffer (uint8, aligned to the element)
    accumulator(length)        memory for an accumulator that outlives a call; None where the own piece serves
    load(own, accumulator)     the accumulator, holding the prescaled own contribution (None: in scratch or in place)
    fold(accumulator, other)   reduce one more contribution, prescaled, into it
    merge(accumulator, other)  reduce another accumulator into it
    finish(accumulator)        apply divisor and postscale
    store(accumulator, own)    write it into the own piece, rounded once
    copy(target, source)       copy a piece
    """

    library: Any

    def __init__(self, element: Element, op: AnyOp, factors: Factors) -> None:
        self.element = element
        self.op = op
        self.factors = factors
        self._reduce = getattr(self.library, _FUNCTIONS[op])

    def merge(self, accumulator: Any, other: Any) -> None:
        self._reduce(accumulator, other, out=accumulator)


class ArrayKernel(Kernel):
    """The types numpy computes: accumulates in place. Subclasses apply factors.

    As it is it serves truth values, whose factors are refused before: numpy's add and maximum are "or", multiply and
    minimum are "and".
    """

    library = np

    def __init__(self, element: Element, op: AnyOp, factors: Factors) -> None:
        super().__init__(element, op, factors)
        self._finishes_joined = factors.postscale != 1 or factors.divisor != 1
        self._factor: Any = None  # What `deliver` multiplies the real numbers of a result with
        self.factor: Any = None  # The same, where that is all it does
        self.copies = True  # Whether `deliver` only copies, where there is no such factor
        self._real = element.storage

    def over(self, buffer: Array) -> Array:
        view: Array = buffer.view(self.element.storage)
        return view

    def accumulator(self, length: int) -> None:
        return None

    def load(self, own: Array, accumulator: Array | None) -> Array:
        if self.factors.prescale != 1:
            self.scale(own, own)
        return own

    def fold(self, accumulator: Array, other: Array) -> None:
        if self.factors.prescale != 1:
            scaled = SCRATCH.array("contribution", self.element.storage, len(other))
            self.scale(other, scaled)
            other = scaled
        self._reduce(accumulator, other, out=accumulator)

    def finish(self, accumulator: Array) -> None:
        pass

    def store(self, accumulator: Array, own: Array) -> None:
        pass  # the accumulator is the own piece

    def copy(self, target: Array, source: Array) -> None:
        np.copyto(target, source)

    def scale(self, source: Array, out: Array) -> None:
        """Write prescale * source to `out`, which may be `source`."""
        np.copyto(out, source)

    # All in one frame: a call between chunks, which empty the caches, costs more than a statement.
    def join(self, rank: int, own: Array, copies: Sequence[Array]) -> None:
        """Reduce the own piece and the peers' copies in the order of the ranks. The first copy holds the result, the
        own piece what `deliver` would write.
        """
        reduce, result = self._reduce, copies[0]
        first, second, *others = [own, *copies] if rank < 2 else [*copies[:rank], own, *copies[rank:]]
        reduce(first, second, out=result)
        for other in others:
            reduce(result, other, out=result)
        if self._finishes_joined:
            self.finish(result)
        if self.factor is not None:
            np.multiply(result, self.factor, own)
        elif self.copies:
            own[...] = result
        else:
            self.deliver(own, result)

    def deliver(self, target: Array, source: Array) -> None:
        """Write the result of `join` to `target`, finished."""
        np.copyto(target, source)

    def calls(self, copies: Sequence[Array], own: Array) -> list[KernelCall] | None:
        """The calls that make `join` and `deliver` of these to `own`; None where they are not known beforehand."""
        if self._finishes_joined:
            return None
        first, second, *others = copies
        out = {"out": own}
        calls = [(self._reduce, (first, second), out), *((self._reduce, (own, other), out) for other in others)]
        if self._factor is not None:
            real = own.view(self._real)
            calls.append((np.multiply, (real, self._factor), {"out": real}))
        return calls


class IntegerKernel(ArrayKernel):
    """Integers: factors in double, truncated toward zero; a plain division is exact."""

    def scale(self, source: Array, out: Array) -> None:
        wide = SCRATCH.array("double", np.dtype(np.float64), len(source))
        np.multiply(source, self.factors.prescale, out=wide)
        np.copyto(out, wide, casting="unsafe")

    def finish(self, accumulator: Array) -> None:
        factors = self.factors
        if factors.postscale != 1 or factors.divisor > np.iinfo(accumulator.dtype).max:
            wide = SCRATCH.array("double", np.dtype(np.float64), len(accumulator))
            np.multiply(accumulator, factors.postscale, out=wide)
            np.divide(wide, factors.divisor, out=wide)
            np.copyto(accumulator, wide, casting="unsafe")
        elif factors.divisor != 1:
            self._divide(accumulator, factors.divisor)

    def _divide(self, values: Array, divisor: int) -> None:
        if values.dtype.kind == "i":
            # floor((x + divisor - 1) / divisor) is the quotient rounded up: toward zero where x is negative.
            shift = SCRATCH.array("contribution", values.dtype, len(values))
            np.less(values, 0, out=shift, casting="unsafe")
            np.multiply(shift, divisor - 1, out=shift)
            np.add(values, shift, out=values)
        np.floor_divide(values, divisor, out=values)


class FloatKernel(ArrayKernel):
    """float32, float64 and complex: one multiplication by a factor of the same width."""

    def __init__(self, element: Element, op: AnyOp, factors: Factors) -> None:
        super().__init__(element, op, factors)
        # A complex number is scaled as two real ones: a complex product would make NaN of infinity.
        self._real = np.dtype(np.float32) if element.storage in (np.float32, np.complex64) else np.dtype(np.float64)
        with np.errstate(over="ignore"):
            self._pre = self._real.type(factors.prescale)
            self._post = self._real.type(factors.post)
        self._finishes_joined = False
        self._factor = None if factors.post == 1 else self._post
        self.factor = None if element.storage.kind == "c" else self._factor
        self.copies = self._factor is None

    def scale(self, source: Array, out: Array) -> None:
        np.multiply(source.view(self._real), self._pre, out=out.view(self._real))

    def deliver(self, target: Array, source: Array) -> None:
        if self._factor is None:
            np.copyto(target, source)
        else:
            np.multiply(source.view(self._real), self._factor, out=target.view(self._real))

    def finish(self, accumulator: Array) -> None:
        if self.factors.post != 1:
            real = accumulator.view(self._real)
            np.multiply(real, self._post, out=real)


class HalfKernel(Kernel):
    """float16 and bfloat16: everything is computed in float32 and rounded once, by torch."""

    library = torch

    def over(self, buffer: Array) -> torch.Tensor:
        return ordinary_tensor(buffer, self.element.dtype)

    def accumulator(self, length: int) -> torch.Tensor | None:
        return ordinary_tensor(np.empty(length, np.float32), torch.float32)

    def load(self, own: torch.Tensor, accumulator: torch.Tensor | None) -> torch.Tensor:
        wide = SCRATCH.wide("accumulator", len(own)) if accumulator is None else accumulator[: len(own)]
        return self._widen(own, wide)

    def fold(self, accumulator: torch.Tensor, other: torch.Tensor) -> None:
        wide = self._widen(other, SCRATCH.wide("contribution", len(other)))
        self._reduce(accumulator, wide, out=accumulator)

    def finish(self, accumulator: torch.Tensor) -> None:
        if self.factors.post != 1:
            accumulator.mul_(self.factors.post)

    def store(self, accumulator: torch.Tensor, own: torch.Tensor) -> None:
        own.copy_(accumulator)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def _widen(self, narrow: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
        wide.copy_(narrow)
        if self.factors.prescale != 1:
            wide.mul_(self.factors.prescale)
        return wide


class DirectKernel(HalfKernel):
    """float16 and bfloat16 in place, at half the cost: where that gives the same bits, see `direct_contributions`."""

    def load(self, own: torch.Tensor, accumulator: torch.Tensor | None) -> torch.Tensor:
        return own

    def fold(self, accumulator: torch.Tensor, other: torch.Tensor) -> None:
        self._reduce(accumulator, other, out=accumulator)

    def store(self, accumulator: torch.Tensor, own: torch.Tensor) -> None:
        pass  # the accumulator is the own piece


class ThreadedKernel(DirectKernel):
    """Large sums of what numpy computes, to the same bits, by torch with its threads; see `threaded_kernel`."""

    def fold(self, accumulator: torch.Tensor, other: torch.Tensor) -> None:
        torch.add(other, accumulator, out=accumulator)  # Where two NaN meet torch keeps the second, numpy the first


def threaded_kernel(element: Element, op: AnyOp, factors: Factors) -> ThreadedKernel | None:
    """Only for sums of real numbers: torch multiplies complex ones otherwise, and the minimum of two zeros may have
    either sign. None for all others.
    """
    scaled = factors.postscale != 1 or factors.divisor != 1
    known = element.kind is Kind.FLOAT or (element.kind is Kind.INTEGER and not scaled)
    return ThreadedKernel(element, op, factors) if known and _FUNCTIONS[op] == "add" and factors.prescale == 1 else None


def direct_contributions(dtype: torch.dtype, op: AnyOp, factors: Factors) -> int:
    """Return how many 16-bit contributions besides the own one can be reduced in place with the same result.

    torch computes each 16-bit operation in float32 and rounds. A minimum needs no rounding, a sum of two has one
    in either way; a factor is a second one unless it is a power of two. float16 could overflow before it.
    """
    if factors.prescale != 1:
        return -1
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        return sys.maxsize
    exact = factors.post == 1 or (dtype is torch.bfloat16 and abs(math.frexp(factors.post)[0]) == 0.5)
    return 1 if exact else 0
