"""What the ranks put in and what must come out, computed on every rank for itself."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hvlike import Average, Max, Min, Product, Sum
from hvlike.backends.arithmetic.reduce_op import ReduceOp

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
DTYPES = (*INTEGERS, *FLOATS, torch.bool, *COMPLEX)
OPS = (Average, Sum, Min, Max, Product)

CHUNK_BYTES = 256 * 1024

Array = NDArray[Any]


def defined(op: ReduceOp, dtype: torch.dtype) -> bool:
    """Whether the reduction exists: truth values have no mean, complex numbers no order."""
    if dtype is torch.bool:
        return op is not Average
    return not (dtype in COMPLEX and op in (Min, Max))


def contribution(rank: int, shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """What `rank` puts in: small whole numbers, so that sums and products are exact in every dtype."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype is torch.bool:
        return torch.rand(tuple(shape), generator=generator) < 0.5
    low = 0 if dtype is torch.uint8 else -3
    values = torch.randint(low, 4, tuple(shape), generator=generator)
    if dtype in COMPLEX:
        imaginary = torch.randint(-3, 4, tuple(shape), generator=generator)
        return torch.complex(values.double(), imaginary.double()).to(dtype)
    return values.to(dtype)


FOLDS: dict[str, np.ufunc] = {
    "SUM": np.add,
    "AVERAGE": np.add,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "PRODUCT": np.multiply,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}
"""What numpy calls them; of truth values its sum is "or", its product "and"."""


def reduced(op: ReduceOp | str, inputs: Sequence[Tensor], prescale: float = 1.0, postscale: float = 1.0) -> Tensor:
    """Reduce over ranks by definition, in the widest type, integers truncated toward zero at each scaling."""
    name = op if isinstance(op, str) else op.name
    dtype = inputs[0].dtype
    whole = not dtype.is_floating_point and not dtype.is_complex
    wide = torch.int64 if whole else torch.complex128 if dtype.is_complex else torch.float64
    arrays = [each.detach().to(torch.bool if dtype is torch.bool else wide).numpy() for each in inputs]
    total = functools.reduce(FOLDS[name], [_scale(each, prescale, whole) for each in arrays])
    total = _scale(total, postscale / (len(inputs) if name == "AVERAGE" else 1), whole)
    return torch.from_numpy(np.asarray(total)).to(dtype)


def _scale(values: Array, factor: float, whole: bool) -> Array:
    if factor == 1:
        return values
    if not whole:
        return np.asarray(values * factor)
    # Rounded before it is cut off: 3 * (1/3) is 1.
    return np.asarray(np.trunc(values * factor + np.sign(values) * 1e-9)).astype(np.int64)


def contiguous(values: Tensor) -> Tensor:
    """Row by row."""
    return values.clone(memory_format=torch.contiguous_format)


def transposed(values: Tensor) -> Tensor:
    """Column by column: dense, in another order."""
    order = tuple(reversed(range(values.dim())))
    return values.permute(order).clone(memory_format=torch.contiguous_format).permute(order)


def with_gaps(values: Tensor) -> Tensor:
    """Every other element of a larger tensor."""
    shape = (*values.shape[:-1], 2 * values.shape[-1]) if values.dim() else (2,)
    room = torch.ones(shape, dtype=values.dtype)
    part = room[..., ::2] if values.dim() else room[1]
    part.copy_(values)
    return part


def in_the_middle(values: Tensor) -> Tensor:
    """Contiguous, but neither at the start nor at the end of its storage."""
    room = torch.ones(values.numel() + 10, dtype=values.dtype)
    part = room[3 : 3 + values.numel()].view(values.shape)
    part.copy_(values)
    return part


def channels_last(values: Tensor) -> Tensor:
    """Channels fastest, for images (4-d); contiguous otherwise."""
    return values.clone(memory_format=torch.channels_last if values.dim() == 4 else torch.contiguous_format)


def lazy(values: Tensor) -> Tensor:
    """A conjugate or negative that torch has not computed yet."""
    if values.is_complex():
        return torch.conj_physical(values).conj()
    return torch._neg_view(-values) if values.is_floating_point() else values.clone()


def leaf(values: Tensor) -> Tensor:
    """A leaf that requires grad, as parameters are."""
    return values.clone().requires_grad_(values.is_floating_point() or values.is_complex())


def inferred(values: Tensor) -> Tensor:
    """A tensor of inference mode."""
    with torch.inference_mode():
        return values.clone()


def untouched_beside(tensor: Tensor, values: Tensor) -> bool:
    """Whether `values` stand where the tensor lies in a room of ones, and nothing else was written there."""
    room = tensor._base
    if room is None or tensor.is_conj() or tensor.is_neg():
        return True
    room = room.clone()
    part = room.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
    stands = torch.equal(part, values)
    part.fill_(1)
    return stands and bool((room == 1).all())


LAYOUTS = (contiguous, transposed, with_gaps, in_the_middle, channels_last)

SHAPES = (
    (),
    (0,),
    (1,),
    (5,),
    (3, 0, 2),
    (2, 3, 4, 5),
    (300, 301),
)
"""Of ordinary sizes; those around a chunk are made for each dtype by `chunk_shapes`."""


def chunk_shapes(dtype: torch.dtype) -> list[tuple[int, ...]]:
    """Exactly one chunk, one element around it, and several chunks with a rest."""
    elements = CHUNK_BYTES // dtype.itemsize
    return [(elements,), (elements - 1,), (elements + 1,), (3 * elements + 17,)]


def same(result: Tensor, expected: Tensor) -> None:
    """The values agree to the precision of the dtype; shape and dtype exactly."""
    assert result.shape == expected.shape
    torch.testing.assert_close(result, expected, equal_nan=True)


def elements(shape: Sequence[int]) -> int:
    """How many elements a tensor of this shape has."""
    return math.prod(shape)
