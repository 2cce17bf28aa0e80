"""The contestants of bench allreduce: the same sum or average in place, and the floors under it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

import hvlike
from hvlike.bench.bare import BARE, BareLoop
from hvlike.bench.comparison import Contestant
from hvlike.bench.torch_group import TorchGroup
from hvlike.errors import HvlikeError
from hvlike.transport.dtypes import Array
from hvlike.transport.raw import RawMpi

OURS = "hvlike"
SHARED = "empty_shared"
MPI = "MPI_Allreduce"
GLOO = "gloo"
NCCL = "NCCL"
HOROVOD = "Horovod"
FLOOR = "read-write pass"
SHARED_FLOOR = "pass, shared"
COPY = "memcpy"

DTYPES = {
    str(each).removeprefix("torch."): each
    for each in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64)
}
_HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Case:
    """What is reduced: a tensor of `size` bytes, summed or averaged in place."""

    size: int
    dtype: torch.dtype
    average: bool

    @property
    def dtype_name(self) -> str:
        """As the command line spells it."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def length(self) -> int:
        """Number of elements."""
        return max(1, self.size // self.dtype.itemsize)

    def fill(self, tensor: Tensor, rank: int) -> None:
        """Write what a rank contributes."""
        tensor.fill_(rank + 1)

    def verify(self, tensor: Tensor, name: str, rank: int, ranks: int) -> None:
        """Look at the result. Raises: HvlikeError."""
        total = sum(range(1, ranks + 1))
        expected = total / ranks if self.average else total
        if not bool((tensor == expected).all()):
            raise HvlikeError(
                f"rank {rank}: {name} reduced {self.size} bytes of {self.dtype_name} to something else than "
                f"{expected} everywhere."
            )


def contestants(case: Case, raw: RawMpi, group: TorchGroup | None, bare: BareLoop | None = None) -> list[Contestant]:
    """Return those who can take part, each with its own way to reduce. Collective."""
    tensor = torch.zeros(case.length, dtype=case.dtype)
    shared = hvlike.empty_shared(case.length, dtype=case.dtype)
    entered = [
        _reducing(case, OURS, tensor, _by_hvlike(case, tensor, "ordinary")),
        _reducing(case, SHARED, shared, _by_hvlike(case, shared, "shared")),
        _by_mpi(case, tensor, raw),
    ]
    if group is not None:
        entered.append(_reducing(case, GLOO, tensor, partial(_by_gloo, case, tensor, group)))
    if bare is not None and case.dtype not in _HALVES:
        entered.append(_reducing(case, BARE, tensor, _by_bare_loop(case, tensor, bare)))
    return [*entered, *_floors(case, tensor), _pass(case, SHARED_FLOOR, shared)]


def contestants_on_gpu(case: Case, device: torch.device, group: TorchGroup | None) -> list[Contestant]:
    """Return those who can reduce a tensor of a GPU, and the floor there. Collective."""
    tensor = torch.zeros(case.length, dtype=case.dtype, device=device)
    entered = [_reducing(case, OURS, tensor, _by_hvlike(case, tensor, "cuda"))]
    if group is not None:
        name = GLOO if group.backend == "gloo" else NCCL
        entered.append(_reducing(case, name, tensor, partial(_by_gloo, case, tensor, group)))
    floor = Contestant(FLOOR, partial(case.fill, tensor, hvlike.rank()), partial(_pass_on_gpu, tensor))
    return [_to_its_end(each, device) for each in [*entered, floor]]


def _pass_on_gpu(tensor: Tensor) -> None:
    tensor.mul_(1)


def _to_its_end(contestant: Contestant, device: torch.device) -> Contestant:
    """The same, timed until the GPU has done what was asked of it."""

    def prepare() -> None:
        contestant.prepare()
        torch.cuda.synchronize(device)

    def run() -> None:
        contestant.run()
        torch.cuda.synchronize(device)

    return replace(contestant, prepare=prepare, run=run)


def _reducing(case: Case, name: str, tensor: Tensor, run: Callable[[], None]) -> Contestant:
    rank, ranks = hvlike.rank(), hvlike.size()
    return Contestant(name, partial(case.fill, tensor, rank), run, lambda: case.verify(tensor, name, rank, ranks))


def _by_hvlike(case: Case, tensor: Tensor, kind: str) -> Callable[[], None]:
    name = f"bench.{kind}.{case.dtype_name}.{case.length}"
    op = hvlike.Average if case.average else hvlike.Sum

    def run() -> None:
        hvlike.allreduce_(tensor, op=op, name=name)

    return run


def _by_mpi(case: Case, tensor: Tensor, raw: RawMpi) -> Contestant:
    """16-bit floats, which MPI does not add (bfloat16) or adds slowly, go as the same values in float32."""
    if case.dtype in _HALVES:
        tensor = torch.zeros(case.length)
    array = tensor.numpy()

    def run() -> None:
        raw.allreduce(array)
        if case.average:
            np.divide(array, hvlike.size(), out=array)

    return _reducing(case, MPI, tensor, run)


def _by_gloo(case: Case, tensor: Tensor, group: TorchGroup) -> None:
    group.allreduce(tensor)
    if case.average:
        tensor.div_(hvlike.size())


def _by_bare_loop(case: Case, tensor: Tensor, bare: BareLoop) -> Callable[[], None]:
    chunks = bare.chunks([tensor.numpy()])
    return partial(bare.reduce, chunks, 1 / hvlike.size() if case.average else None)


def _floors(case: Case, tensor: Tensor) -> list[Contestant]:
    """One pass over the same bytes, by all ranks at once: in place, and into other memory."""
    array = _array(tensor)
    other = np.zeros_like(array)
    prepare = partial(case.fill, tensor, hvlike.rank())
    return [_pass(case, FLOOR, tensor), Contestant(COPY, prepare, lambda: np.copyto(other, array))]


def _pass(case: Case, name: str, tensor: Tensor) -> Contestant:
    """Read and write every byte once, in place."""
    array = _array(tensor)
    factor = array.dtype.type(1)
    prepare = partial(case.fill, tensor, hvlike.rank())
    return Contestant(name, prepare, lambda: np.multiply(array, factor, out=array))


def _array(tensor: Tensor) -> Array:
    """The bytes of a tensor in the widest type they fill that is fast to multiply."""
    array: Array = tensor.view(torch.uint8).numpy().view(np.float32 if tensor.nbytes % 4 == 0 else np.uint8)
    return array
