"""PowerSGD: a gradient matrix is reduced as the product of two thin ones.

Source: Vogels, Karimireddy, Jaggi, "PowerSGD", NeurIPS 2019.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hvlike.collectives.compression.compressor import Exchange, StatefulCompressor
from hvlike.errors import UsageError
from hvlike.transport.loop.coroutine import Coroutine, Wait

_BLOCK_ELEMENTS = 1 << 15


def product(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right` in their own precision, also where the caller computes under autocast."""
    with torch.autocast(left.device.type, enabled=False):
        return torch.mm(left, right)


def orthonormal(matrix: Tensor, epsilon: float = 0.0) -> Tensor:
    """An orthonormal basis of the columns of (n, r), n >= r; columns without content give some orthogonal direction.

    epsilon: a column of which the length d is left is shortened to d / (d + epsilon), so that those without vanish.
    """
    basis: Tensor
    basis, triangle = torch.linalg.qr(matrix)
    if epsilon:
        lengths = triangle.diagonal().abs()
        basis = basis * (lengths / (lengths + epsilon))
    return basis.contiguous()


def outer_sum(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right.T` of (n, r) and (m, r) in a fixed order: equal inputs give bitwise equal results everywhere."""
    rows, columns = len(left), len(right)
    result = torch.empty((rows, columns), dtype=left.dtype, device=left.device)
    terms = right.t().contiguous()
    # A GPU has no use for blocks that fit a cache, and each would cost it some kernels.
    step = max(1, _BLOCK_ELEMENTS // max(1, columns)) if left.is_cpu else max(1, rows)
    scratch = torch.empty((min(step, rows), columns), dtype=left.dtype, device=left.device)
    for start in range(0, rows, step):
        block, factors = result[start : start + step], left[start : start + step]
        torch.mul(factors[:, :1], terms[0], out=block)
        addend = scratch[: len(block)]
        for index in range(1, len(terms)):
            torch.mul(factors[:, index : index + 1], terms[index], out=addend)
            block.add_(addend)
    return result


def random_matrix(shape: tuple[int, int], dtype: torch.dtype, *key: object) -> Tensor:
    """Standard normal numbers that depend on nothing but `key`; torch's own generators are not touched."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    return torch.randn(shape, dtype=dtype, generator=generator, device="cpu")


@dataclass(eq=False)
class _Work:
    name: str
    tensor: Tensor
    matrix: Tensor
    q: Tensor
    p: Tensor = field(default_factory=lambda: torch.empty(0, device="cpu"))


class PowerSGD(StatefulCompressor):
    """Low-rank compression of the gradients of one DistributedOptimizer, with error feedback and warm start.

    A tensor is seen as the matrix of its first dimension by all others. float16 and bfloat16 are computed in float32;
    the result is bitwise the same on every rank. A step whose gradients are not finite gives NaN on every rank and is
    not remembered. With a GradScaler the errors are those of scaled gradients.

    Args:
        matrix_approximation_rank: Columns of P and Q; 1 to 4 is usual, more is closer and sends more.
        start_powerSGD_iter: Steps that are reduced in full before compression begins; 0 compresses from the first on.
        min_compression_rate: A tensor of (n, m) elements is compressed only where
            n m > (n + m) rank min_compression_rate; vectors never are.
        use_error_feedback: Add what a step could not carry to the next one.
        warm_start: Begin with the Q of the step before, else with random numbers.
        orthogonalization_epsilon: Added to the length of a column before it is divided by it; not needed against zeros.
        random_seed: The same on all ranks.

    Raises:
        UsageError: Wrong arguments.

    Source: Vogels, Karimireddy, Jaggi, PowerSGD, NeurIPS 2019 (arXiv 1905.13727), algorithms 1 and 2; names and
    defaults of torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook.PowerSGDState.
    """

    def __init__(
        self,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1_000,
        min_compression_rate: float = 2.0,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0.0,
        random_seed: int = 0,
    ) -> None:
        super().__init__(use_error_feedback=use_error_feedback)
        _check_whole("matrix_approximation_rank", matrix_approximation_rank, least=1)
        _check_whole("start_powerSGD_iter", start_powerSGD_iter, least=0)
        _check_whole("random_seed", random_seed)
        if not min_compression_rate > 0:
            raise UsageError(f"PowerSGD: min_compression_rate must be > 0, got {min_compression_rate!r}.")
        if not orthogonalization_epsilon >= 0:
            raise UsageError(f"PowerSGD: orthogonalization_epsilon must be >= 0, got {orthogonalization_epsilon!r}.")
        self.matrix_approximation_rank = matrix_approximation_rank
        self.start_powerSGD_iter = start_powerSGD_iter
        self.min_compression_rate = min_compression_rate
        self.warm_start = warm_start
        self.orthogonalization_epsilon = orthogonalization_epsilon
        self.random_seed = random_seed

    def reduce(self, names: Sequence[str], tensors: Sequence[Tensor], exchange: Exchange) -> Coroutine[None]:
        """Reduce in place: compressed where that saves enough, in full elsewhere. Collective over the exchange."""
        self._take_place(exchange)
        plain: list[Tensor] = []
        works: list[_Work] = []
        for name, tensor in zip(names, tensors, strict=True):
            if self.iteration >= self.start_powerSGD_iter and self.compresses(tensor):
                works.append(self._begin(name, tensor))
                yield Wait.AGAIN
            else:
                plain.append(tensor)
        yield from exchange.allreduce([*(work.p for work in works), *plain])
        carried = yield from _finite_ones(works, [work.p for work in works], exchange)
        yield from self._orthonormalise(carried, exchange)
        for work in carried:
            work.q = product(work.matrix.t(), work.p).contiguous()
            with torch.autocast(work.matrix.device.type, enabled=False):
                work.matrix.addmm_(work.p, work.q.t(), alpha=-1)
            yield Wait.AGAIN
        yield from exchange.allreduce([work.q for work in carried])
        for work in (yield from _finite_ones(carried, [work.q for work in carried], exchange)):
            self._end(work)
            yield Wait.AGAIN
        self._count(
            sum(each.nbytes for each in tensors),
            sum(each.nbytes for each in plain) + sum(work.p.nbytes + work.q.nbytes for work in works),
        )

    def compresses(self, tensor: Tensor) -> bool:
        if tensor.dim() < 2 or not tensor.dtype.is_floating_point or not tensor.numel():
            return False
        rows, columns = _matrix_shape(tensor)
        rank = min(rows, columns, self.matrix_approximation_rank)
        return (rows + columns) * rank * self.min_compression_rate < rows * columns

    def _begin(self, name: str, tensor: Tensor) -> _Work:
        matrix = self._with_error(name, tensor.reshape(_matrix_shape(tensor)))
        q = self._start(name, matrix)
        return _Work(name, tensor, matrix, q, product(matrix, q).contiguous())

    def _start(self, name: str, matrix: Tensor) -> Tensor:
        """The orthonormal Q that this step begins with."""
        rows, columns = matrix.shape
        shape = (columns, min(rows, columns, self.matrix_approximation_rank))
        kept = self._shared.get(name) if self.warm_start else None
        start = random_matrix(shape, matrix.dtype, self.random_seed, self.iteration, name).to(matrix.device)
        if kept is not None and tuple(kept.shape) == shape and kept.dtype is matrix.dtype:
            # A column of zeros would stay one for ever.
            kept = kept.to(matrix.device)
            start = torch.where((kept == 0).all(dim=0), start, kept)
        return orthonormal(start)

    def _orthonormalise(self, works: Sequence[_Work], exchange: Exchange) -> Coroutine[None]:
        """Make the columns of each P orthonormal, on one rank, and give the result to all: no two could differ."""
        owners = [index % exchange.size for index in range(len(works))]
        for work, owner in zip(works, owners, strict=True):
            if owner == exchange.rank:
                work.p = orthonormal(work.p, self.orthogonalization_epsilon)
                yield Wait.AGAIN
        yield from exchange.share([work.p for work in works], owners)

    def _end(self, work: _Work) -> None:
        work.tensor.copy_(outer_sum(work.p, work.q).view(work.tensor.shape))
        if self.use_error_feedback:
            self._next_errors[work.name] = work.matrix
        if self.warm_start:
            self._next_shared[work.name] = work.q


def _matrix_shape(tensor: Tensor) -> tuple[int, int]:
    """(a, b, c, ...) as (a, b c ...)."""
    return tensor.shape[0], math.prod(tensor.shape[1:])


def _finite_ones(works: Sequence[_Work], reduced: Sequence[Tensor], exchange: Exchange) -> Coroutine[list[_Work]]:
    """Look at what is equal on all ranks; where it is not finite, so is the gradient."""
    answers = yield from exchange.are_finite([[each] for each in reduced])
    for work, finite in zip(works, answers, strict=True):
        if not finite:
            work.tensor.fill_(math.nan)
    return [work for work, finite in zip(works, answers, strict=True) if finite]


def _check_whole(name: str, value: object, least: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
        bound = "" if least is None else f" >= {least}"
        raise UsageError(f"PowerSGD: {name} must be a whole number{bound}, got {value!r}.")
