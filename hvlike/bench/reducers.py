"""The contestants of bench allreduce: the same sum or average in place, and the floors under it.

Besides hvlike these are MPI, a process group of torch (gloo or NCCL) and the bare loop, a reduction over two ranks
with nothing around it but copies, additions and two flags:

    rank 0   stage B   reduce A   stage D   take B   reduce C  ...
    rank 1   stage A   reduce B   stage C   take A   reduce D  ...      (A, C owned by 0; B, D by 1)

Where hvlike misses a goal, the bare loop says whether the library or the machine is in the way.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import hvlike
from hvlike.backends.shared_memory.schedule import SLOTS, SMALLEST_SHARE, cut, fitting
from hvlike.bench.harness.comparison import Contestant
from hvlike.bench.harness.raw_mpi import RawMpi
from hvlike.collectives.session.context import current
from hvlike.errors import HvlikeError, UsageError
from hvlike.transport.memory.doorbell import X86
from hvlike.transport.memory.dtypes import Array

GLOO_BACKEND, NCCL_BACKEND = "gloo", "nccl"

_LOOPBACK = "127.0.0.1"


def backend_for(device: torch.device) -> str:
    """Return NCCL where each rank of this node can have its own GPU; gloo for the CPU, and where ranks share one."""
    if device.type == "cpu" or hvlike.local_size() > torch.cuda.device_count():
        return GLOO_BACKEND
    return NCCL_BACKEND if torch.distributed.is_nccl_available() else GLOO_BACKEND


def torch_unavailable(backend: str = GLOO_BACKEND) -> str | None:
    """Return why torch's group cannot take part, or None."""
    distributed: Any = torch.distributed
    if hvlike.local_size() != hvlike.size():
        return "the ranks are on several nodes, its rendezvous here is on loopback"
    if not distributed.is_available() or not distributed.is_backend_available(backend):
        return "this torch was built without it"
    return None


class TorchGroup:
    """A process group of torch over all ranks. Collective."""

    def __init__(self, backend: str = GLOO_BACKEND) -> None:
        distributed: Any = torch.distributed
        rank, size = hvlike.rank(), hvlike.size()
        timeout = datetime.timedelta(seconds=60)
        store = distributed.TCPStore(_LOOPBACK, 0, size, True, timeout, wait_for_workers=False) if rank == 0 else None
        port = torch.tensor([store.port if store else 0])
        hvlike.broadcast_(port, 0, name=f"{backend}'s port")
        if store is None:
            store = distributed.TCPStore(_LOOPBACK, int(port), size, False, timeout)
        distributed.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        self.backend = backend
        self._distributed = distributed

    def allreduce(self, tensor: torch.Tensor) -> None:
        """Sum over ranks in place."""
        self._distributed.all_reduce(tensor)

    def close(self) -> None:
        """End the process group."""
        self._distributed.destroy_process_group()


BARE = "bare loop"

_CHUNK_BYTES = 128 << 10
_WORDS_BYTES = 4096
_STAGED, _REDUCED = 0, 8
"""Words of a rank, on lines of their own: how many chunks it has staged, and reduced."""

_STARTS = range(_WORDS_BYTES, _WORDS_BYTES + SLOTS * _CHUNK_BYTES, _CHUNK_BYTES)

_MOST_POLLS = 1 << 28
"""These take minutes: then the other rank has left."""


class BareLoop:
    """A reduction over two ranks in the memory they share. Both ranks make each call."""

    def __init__(self) -> None:
        """Collective. Raises: UsageError unless there are two ranks on one node of x86 cores, which order stores."""
        if hvlike.size() != 2 or hvlike.local_size() != 2 or not X86:
            raise UsageError(
                f"--bare is for two ranks on one node of x86 cores; there are {hvlike.size()} ranks, "
                f"{hvlike.local_size()} of them on this node."
            )
        self._rank = rank = hvlike.rank()
        nbytes = _WORDS_BYTES + SLOTS * _CHUNK_BYTES
        self._memory = hvlike.empty_shared(nbytes, dtype=torch.uint8)
        found = current().fabric.allocations.find(self._memory.data_ptr(), nbytes)
        if found is None:
            raise HvlikeError(f"rank {rank}: the tensor of empty_shared is not among the shared allocations.")
        copies = [found[0].copy(each) for each in (0, 1)]
        self._mine, self._peer = (copies[each][:_WORDS_BYTES].data.cast("Q") for each in (rank, 1 - rank))
        self._slots = [[copy[start : start + _CHUNK_BYTES] for start in _STARTS] for copy in copies]
        self._mine[_STAGED] = self._mine[_REDUCED] = 0
        hvlike.barrier()

    def chunks(self, arrays: Sequence[Array]) -> list[Array]:
        """Cut flat arrays of one dtype into chunks, which the two ranks own in turn."""
        itemsize = arrays[0].itemsize
        lengths = [len(each) for each in arrays]
        elements = fitting(sum(lengths), _CHUNK_BYTES // itemsize, SMALLEST_SHARE // itemsize, 2)
        return [arrays[index][start:stop] for index, start, stop in cut(lengths, elements)]

    def reduce(self, chunks: Sequence[Array], factor: float | None = None) -> None:
        """Write the sum of both ranks' chunks, times a factor, to both.

        Raises: HvlikeError if the other rank does not come.
        """
        rank, mine, peer = self._rank, self._mine, self._peer
        storage = chunks[0].dtype
        # What this rank stages lies in its own slots, what the peer stages for it in the peer's.
        staging, copies = ([slot.view(storage) for slot in self._slots[each]] for each in (rank, 1 - rank))
        own, foreign = chunks[rank::2], chunks[1 - rank :: 2]
        staged, taken, reduced = mine[_STAGED], mine[_STAGED], mine[_REDUCED]
        to_stage, to_reduce, looks = iter(foreign), iter(own), 0
        to_take, left = iter(foreign), len(foreign) + len(own)
        last_staged, last_reduced = staged + len(foreign), reduced + len(own)
        while left:
            looks += 1
            if staged < last_staged and staged - taken < SLOTS:
                chunk = next(to_stage)
                staging[staged % SLOTS][: len(chunk)] = chunk
                staged += 1
                mine[_STAGED] = staged
            if reduced < last_reduced and peer[_STAGED] > reduced:
                chunk = next(to_reduce)
                copy = copies[reduced % SLOTS][: len(chunk)]
                chunk += copy
                if factor is not None:
                    chunk *= factor
                copy[:] = chunk
                reduced += 1
                mine[_REDUCED] = reduced
                left, looks = left - 1, 0
            if taken < staged and peer[_REDUCED] > taken:
                chunk = next(to_take)
                chunk[:] = staging[taken % SLOTS][: len(chunk)]
                taken += 1
                left, looks = left - 1, 0
            if looks > _MOST_POLLS:
                raise HvlikeError(f"rank {rank}: the other rank has left the bare loop.")


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
        """Its name on the command line."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def length(self) -> int:
        """Number of elements."""
        return max(1, self.size // self.dtype.itemsize)

    def fill(self, tensor: Tensor, rank: int) -> None:
        """Write what a rank contributes."""
        tensor.fill_(rank + 1)

    def verify(self, tensor: Tensor, name: str, rank: int, ranks: int) -> None:
        """Check the result. Raises: HvlikeError."""
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
    """Return the same contestant, timed until the GPU has done its work."""

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
    """Return the bytes of a tensor as float32 where they fill that, else as uint8."""
    array: Array = tensor.view(torch.uint8).numpy().view(np.float32 if tensor.nbytes % 4 == 0 else np.uint8)
    return array
