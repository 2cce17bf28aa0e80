"""The contestants of bench allreduce: the same sum or average in place, and the floors under it.

Besides hvlike these are MPI, a process group of torch (gloo or NCCL) and the bare loop, a reduction over two ranks
with nothing around it but copies, additions and two flags:

    rank 0   stage B   reduce A   stage D   take B   reduce C  ...
    rank 1   stage A   reduce B   stage C   take A   reduce D  ...      (A, C owned by 0; B, D by 1)

Where hvlike misses a goal, the bare loop says whether the library or the machine is in the way. So does the raw
exchange between nodes: every rank sends its share of the node's bytes to another node, and receives as many.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import socket
import struct
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
from hvlike.system.system import system
from hvlike.transport.memory.dtypes import Array

GLOO_BACKEND, NCCL_BACKEND = "gloo", "nccl"
_LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915  # Asks Linux for the address of an interface
BARE = "bare loop"
_CHUNK_BYTES = 128 << 10
_WORDS_BYTES = 4096
_STAGED, _REDUCED = 0, 8  # Words of a rank, on lines of their own: how many chunks it has staged, and reduced
_STARTS = range(_WORDS_BYTES, _WORDS_BYTES + SLOTS * _CHUNK_BYTES, _CHUNK_BYTES)
_MOST_POLLS = 1 << 28  # These take minutes: then the other rank has left
OURS, SHARED, MPI, GLOO, NCCL, HOROVOD = "hvlike", "empty_shared", "MPI_Allreduce", "gloo", "NCCL", "Horovod"
EXCHANGE = "raw exchange"
EXCHANGE_MEANS = (
    f"{EXCHANGE}, across nodes: each rank sends its share of the bytes to another node and gets as many; no sum."
)
FLOOR, SHARED_FLOOR, COPY = "read-write pass", "pass, shared", "memcpy"
# Above 1 where others come first: hvlike is faster; where hvlike comes first: how far it is from the floor.
RATIOS = {
    "MPI/hvlike": (MPI, OURS),
    "gloo/hvlike": (GLOO, OURS),
    "NCCL/hvlike": (NCCL, OURS),
    "Horovod/hvlike": (HOROVOD, OURS),
    "MPI/bare": (MPI, BARE),
    "hvlike/bare": (OURS, BARE),
    "hvlike/exchange": (OURS, EXCHANGE),
    "hvlike/pass": (OURS, FLOOR),
    "hvlike/memcpy": (OURS, COPY),
    "MPI/shared": (MPI, SHARED),
    "shared/pass": (SHARED, FLOOR),
    "shared/own pass": (SHARED, SHARED_FLOOR),
}
DTYPES = {
    str(each).removeprefix("torch."): each
    for each in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64)
}
_HALVES = (torch.float16, torch.bfloat16)


def backend_for(device: torch.device) -> str:
    """Return NCCL where each rank of this node can have its own GPU; gloo for the CPU, and where ranks share one."""
    if device.type == "cpu" or hvlike.local_size() > torch.cuda.device_count():
        return GLOO_BACKEND
    return NCCL_BACKEND if torch.distributed.is_nccl_available() else GLOO_BACKEND


def torch_unavailable(backend: str) -> str | None:
    """Why this run leaves torch's group out; None: it can take part. Collective."""
    distributed: Any = torch.distributed
    if not distributed.is_available() or not distributed.is_backend_available(backend):
        return "this torch was built without it"
    if hvlike.local_size() != hvlike.size() and not all(hvlike.allgather_object(bool(addresses()))):
        return "the ranks are on several hosts, and one of these has no IPv4 address"
    return None


def start_torch_group(backend: str) -> None:
    """Make torch's default process group over all ranks, over the network that joins their hosts. Collective."""
    distributed: Any = torch.distributed
    rank, size = hvlike.rank(), hvlike.size()
    timeout = datetime.timedelta(seconds=60)
    place, several = _LOOPBACK, hvlike.local_size() != size
    if several:
        names = addresses()
        place = names.get(os.environ.get("GLOO_SOCKET_IFNAME", "")) or next(iter(names.values()))
        place = hvlike.broadcast_object(place, 0, name=f"{backend}'s address")
    store = distributed.TCPStore(place, 0, size, True, timeout, wait_for_workers=False) if rank == 0 else None
    port = torch.tensor([store.port if store else 0])
    hvlike.broadcast_(port, 0, name=f"{backend}'s port")
    if store is None:
        store = distributed.TCPStore(place, int(port), size, False, timeout)
    if several:
        # gloo would look up the name of the host, which need not have an address.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_to(place, int(port)))
    distributed.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


def addresses() -> dict[str, str]:
    """The IPv4 address of each network interface of this host that has one, but for loopback."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as each:
        for name in (name for _, name in socket.if_nameindex() if name != "lo"):
            with contextlib.suppress(OSError):
                reply = fcntl.ioctl(each.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(reply[20:24])
    return found


def interface_to(address: str, port: int) -> str:
    """The name of this host's interface from which packets to an address leave."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as each:
        each.connect((address, port))
        mine = each.getsockname()[0]
    return next(name for name, own in addresses().items() if own == mine)


class BareLoop:
    """A reduction over two ranks in the memory they share. Both ranks make each call."""

    def __init__(self) -> None:
        """Collective. Raises: UsageError unless there are two ranks on one node of x86 cores, which order stores."""
        if hvlike.size() != 2 or hvlike.local_size() != 2 or not system.orders_stores:
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
        """Write the sum of both ranks' chunks, times a factor, to both. Raises: HvlikeError when the other is gone."""
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


def raw_exchange(raw: RawMpi, nbytes: int) -> Callable[[], None] | None:
    """The messages without which no reduction of so many bytes across nodes can be; None on one node."""
    local = hvlike.local_size()
    if local == hvlike.size():
        return None
    sent, received = (np.zeros(-(-nbytes // local), np.uint8) for _ in range(2))
    return partial(raw.exchange, sent, received, local)


@dataclass(frozen=True)
class BenchTensor:
    """What is reduced: a tensor of `size` bytes, summed or averaged in place."""

    size: int
    dtype: torch.dtype
    average: bool

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def length(self) -> int:
        return max(1, self.size // self.dtype.itemsize)

    def fill(self, tensor: Tensor, rank: int) -> None:
        tensor.fill_(rank + 1)

    def verify(self, tensor: Tensor, name: str, rank: int, ranks: int) -> None:
        total = sum(range(1, ranks + 1))
        expected = total / ranks if self.average else total
        if not bool((tensor == expected).all()):
            raise HvlikeError(
                f"rank {rank}: {name} reduced {self.size} bytes of {self.dtype_name} to something other than "
                f"{expected} everywhere."
            )


def contestants(
    case: BenchTensor, device: torch.device, raw: RawMpi, backend: str | None, bare: BareLoop | None
) -> list[Contestant]:
    """Return those who can take part, and the floors. backend: of torch's group, if there is one. Collective."""
    distributed: Any = torch.distributed
    rank, ranks, average = hvlike.rank(), hvlike.size(), case.average
    tensor = torch.zeros(case.length, dtype=case.dtype, device=device)

    def touching(name: str, tensor: Tensor, run: Callable[[], object]) -> Contestant:
        return Contestant(name, partial(case.fill, tensor, rank), run)

    def reducing(name: str, tensor: Tensor, run: Callable[[], object]) -> Contestant:
        return replace(touching(name, tensor, run), verify=partial(case.verify, tensor, name, rank, ranks))

    def ours(name: str, tensor: Tensor, kind: str) -> Contestant:
        op = hvlike.Average if average else hvlike.Sum
        label = f"bench.{kind}.{case.dtype_name}.{case.length}"
        return reducing(name, tensor, partial(hvlike.allreduce_, tensor, op=op, name=label))

    def by_group() -> None:
        distributed.all_reduce(tensor)
        if average:
            tensor.div_(ranks)

    def passing(name: str, tensor: Tensor) -> Contestant:
        array = _array(tensor)
        return touching(name, tensor, partial(np.multiply, array, array.dtype.type(1), out=array))

    if device.type != "cpu":
        entered = [ours(OURS, tensor, "cuda")]
        if backend is not None:
            entered.append(reducing(GLOO if backend == GLOO_BACKEND else NCCL, tensor, by_group))
        entered.append(touching(FLOOR, tensor, partial(tensor.mul_, 1)))
        return [_to_its_end(each, device) for each in entered]
    # MPI does not add bfloat16, and adds 16-bit floats slowly: they go as the same values in float32.
    summed = torch.zeros(case.length) if case.dtype in _HALVES else tensor
    shared = hvlike.empty_shared(case.length, dtype=case.dtype)
    array, other = summed.numpy(), np.zeros_like(_array(tensor))

    def by_mpi() -> None:
        raw.allreduce(array)
        if average:
            np.divide(array, ranks, out=array)

    entered = [ours(OURS, tensor, "ordinary"), ours(SHARED, shared, "shared"), reducing(MPI, summed, by_mpi)]
    if backend is not None:
        entered.append(reducing(GLOO, tensor, by_group))
    if bare is not None and case.dtype not in _HALVES:
        chunks = bare.chunks([tensor.numpy()])
        entered.append(reducing(BARE, tensor, partial(bare.reduce, chunks, 1 / ranks if average else None)))
    exchange = raw_exchange(raw, tensor.nbytes)
    if exchange is not None:
        entered.append(touching(EXCHANGE, tensor, exchange))
    copy = touching(COPY, tensor, partial(np.copyto, other, _array(tensor)))
    return [*entered, passing(FLOOR, tensor), copy, passing(SHARED_FLOOR, shared)]


def _to_its_end(contestant: Contestant, device: torch.device) -> Contestant:
    def settled(work: Callable[[], object]) -> None:
        work()
        torch.cuda.synchronize(device)

    return replace(contestant, prepare=partial(settled, contestant.prepare), run=partial(settled, contestant.run))


def _array(tensor: Tensor) -> Array:
    """Return the bytes of a tensor as float32 where they fill that, else as uint8."""
    array: Array = tensor.view(torch.uint8).numpy().view(np.float32 if tensor.nbytes % 4 == 0 else np.uint8)
    return array
