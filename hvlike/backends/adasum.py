"""Adasum: a sum that counts what two contributions have in common only once, at any number of ranks.

    adasum(a, b) = (1 - a.b / (2 a.a)) a + (1 - a.b / (2 b.b)) b

Equal vectors give the same vector, orthogonal ones their sum, and a zero vector changes nothing. Every tensor has
coefficients of its own. The contributions of n ranks are combined two at a time (pair_up):

    all ranks' copies of a shard come to its owner          one alltoall
    for each level of the tree
        dot products of each pair, the owner's part         a.a, b.b and a.b for each tensor, in float64
        ... made whole                                      one small allreduce
        each pair becomes one vector                        nothing is sent
    the shards of the result go to all                      one gather

Source: Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021 (arXiv 2006.02924).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.arithmetic.kernels import ordinary_tensor
from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.backends.base import Backend, bytes_of
from hvlike.backends.network.partition import Run, message_length, shards
from hvlike.transport.loop.coroutine import Coroutine, Wait
from hvlike.transport.memory.dtypes import storage_view


def pair_up(count: int) -> list[list[tuple[int, int]]]:
    """Return the pairs of each level; the second of a pair is used up, the first holds the result of both."""
    levels = []
    left = list(range(count))
    while len(left) > 1:
        levels.append(list(zip(left[::2], left[1::2], strict=False)))
        left = left[::2]
    return levels


_SUM_OF_DOUBLES = Arithmetic(torch.float64, ReduceOp.SUM)

BLOCK_ELEMENTS = 1 << 15  # Dot products widen this many elements at a time, in cache


@dataclass(frozen=True)
class Adasum:
    """The Adasum of a group, seen from one of its ranks: postscale * adasum over ranks of (prescale * each)."""

    position: int
    size: int
    prescale: float = 1.0
    postscale: float = 1.0

    def allreduce(self, backend: Backend, tensors: Sequence[torch.Tensor]) -> Coroutine[None]:
        """Reduce flat contiguous CPU tensors of one floating dtype in place; bitwise the same result everywhere. 16-bit
        floats are combined in float32 and rounded once. Needs memory for one copy of what this rank owns from every
        rank, and for one of all tensors if they are many.
        """
        lengths = [len(tensor) for tensor in tensors]
        if not any(lengths):
            return
        dtype = tensors[0].dtype
        # The loop may go on in a thread that is not in the caller's inference mode.
        results = [ordinary_tensor(storage_view(tensor), dtype) for tensor in tensors]
        whole = results[0]
        if len(results) > 1:
            whole = _new(sum(lengths), dtype)
            torch.cat(results, out=whole)
        runs = shards(lengths, self.size)
        parts = list(torch.split(whole, [message_length(shard) for shard in runs]))
        mine = parts[self.position]
        vectors = yield from self._collect(backend, parts)
        yield from self._combine(backend, vectors, runs[self.position], len(tensors))
        mine.copy_(vectors[0].mul_(self.postscale))
        yield from backend.gather([bytes_of(part) for part in parts], range(self.size))
        if len(results) > 1:
            torch._foreach_copy_(results, list(torch.split(whole, lengths)))

    def _collect(self, backend: Backend, parts: Sequence[torch.Tensor]) -> Coroutine[list[torch.Tensor]]:
        length, dtype = len(parts[self.position]), parts[0].dtype
        copies = _new(self.size * length, dtype).view(self.size, length).unbind()
        yield from backend.alltoall([bytes_of(part) for part in parts], [bytes_of(copy) for copy in copies])
        vectors = []
        for copy in copies:
            vector = copy
            if dtype.itemsize < 4:
                vector = _new(length, torch.float32).copy_(copy)
            vectors.append(vector.mul_(self.prescale) if self.prescale != 1 else vector)
        return vectors

    def _combine(
        self, backend: Backend, vectors: Sequence[torch.Tensor], runs: Sequence[Run], tensors: int
    ) -> Coroutine[None]:
        """Make all vectors one, in the first; `runs` maps their elements to tensors."""
        segments = list(_segments(runs))
        for pairs in pair_up(self.size):
            dots = torch.from_numpy(np.zeros((len(pairs), tensors, 3)))
            for number, (first, second) in enumerate(pairs):
                for tensor, segment in segments:
                    dots[number, tensor] += dot_products(vectors[first][segment], vectors[second][segment])
                yield Wait.AGAIN
            yield from backend.allreduce([dots.view(-1)], _SUM_OF_DOUBLES)
            factors = coefficients(dots).tolist()
            for number, (first, second) in enumerate(pairs):
                for tensor, segment in segments:
                    of_first, of_second = factors[number][tensor]
                    vectors[first][segment].mul_(of_first).add_(vectors[second][segment], alpha=of_second)
                yield Wait.AGAIN


def dot_products(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return a.a, b.b and a.b of two flat tensors, added up in float64."""
    total = np.zeros(3)
    for start in range(0, len(first), BLOCK_ELEMENTS):
        a = first[start : start + BLOCK_ELEMENTS].double()
        b = second[start : start + BLOCK_ELEMENTS].double()
        total += (float(a.dot(a)), float(b.dot(b)), float(a.dot(b)))
    return torch.from_numpy(total)


def coefficients(dots: torch.Tensor) -> torch.Tensor:
    """The factors (..., 2) of a and b for their dot products (..., 3); a zero vector and its partner count in full."""
    norms, common = dots[..., :2], dots[..., 2:]
    return torch.where(norms == 0, 1.0, 1.0 - common / (2.0 * norms))


def _segments(runs: Sequence[Run]) -> Iterator[tuple[int, slice]]:
    position = 0
    for run in runs:
        length = run.stop - run.start
        yield run.piece, slice(position, position + length)
        position += length


def _new(length: int, dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised memory that may be written in and out of inference mode."""
    # An empty array has strides that torch cannot view as another dtype.
    return ordinary_tensor(np.empty(max(length, 1) * dtype.itemsize, np.uint8), dtype)[:length]
