"""All ranks have the same module: compared and broadcast at the start, buffers broadcast at each forward."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from functools import cached_property
from weakref import WeakMethod

import torch
from torch import Tensor

from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.backends.base import INCOMPLETE, Backend, active_ranks, bytes_of
from hvlike.backends.cuda.device_backend import home_of
from hvlike.collectives.requests.process_set import ProcessSet
from hvlike.collectives.requests.reduction import arithmetic_of
from hvlike.collectives.requests.request import check_writable
from hvlike.collectives.session.joined_proxy import CountingJob
from hvlike.errors import MismatchError, UsageError
from hvlike.training.broadcast import TensorForm, broadcast_tensors, check_same, find_differences
from hvlike.training.gradients.parameters import gpu_of
from hvlike.training.gradients.planned_queue import Packing, PlannedQueue, send_bytes
from hvlike.transport.loop.coroutine import Coroutine
from hvlike.transport.memory.own_memory import check_memory

_CALL = "DistributedDataParallel"
Find = Callable[[], dict[str, Tensor]]


def verify_and_broadcast(
    parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], root_rank: int, process_set: ProcessSet | None
) -> None:
    for name, tensor in {**parameters, **buffers}.items():
        check_memory(f"{_CALL}, {name!r}", tensor)
    forms = {
        f"parameter {name}": f"{TensorForm.of(tensor)} strides {list(tensor.stride())}"
        f"{'' if tensor.requires_grad else ' without gradient'}"
        for name, tensor in parameters.items()
    }
    forms |= {f"buffer {name}": str(TensorForm.of(tensor)) for name, tensor in buffers.items()}
    check_same(f"{_CALL} expects same model across all ranks", forms, root_rank, process_set, MismatchError)
    broadcast_tensors(_CALL, {**parameters, **buffers}, root_rank, process_set)


class BufferSync:
    """Gives all ranks, joined ones too, the buffers of one: the first, or in a Join context the highest active one."""

    def __init__(self, process_set: ProcessSet | None, find: WeakMethod[Find]) -> None:
        """Local. `find` returns the buffers of now with their names: a module may replace them."""
        self._process_set = process_set
        self._find = find
        self._packing: Packing | None = None

    @cached_property
    def _queue(self) -> PlannedQueue:
        """Made at its first use: buffers that are left to each rank may be of any kind."""
        buffers = self._buffers()
        described = {f"shape and dtype of buffer {name!r}": str(TensorForm.of(each)) for name, each in buffers.items()}
        device = gpu_of(buffers.values())
        queue = PlannedQueue("DistributedDataParallel buffers", self._process_set, described, device=device)
        queue.stand_in = lambda: self._job(active=False)
        return queue

    def _buffers(self) -> dict[str, Tensor]:
        find = self._find()
        return {} if find is None else find()

    def agree(self) -> None:
        for name, buffer in self._buffers().items():
            check_memory(f"{_CALL}, buffer {name!r}", buffer)
        self._queue.agree()

    def join_begins(self) -> None:
        """Be known, so that this rank can follow others: a copied module has no queue before a forward. Local."""
        self._queue.join_begins()

    def sync(self, *, from_highest: bool) -> None:
        """Take over the buffers of the first rank, or `from_highest` of the highest active one. Collective; blocks."""
        self._queue.run(self._job(active=True, from_highest=from_highest))

    def _job(self, *, active: bool, from_highest: bool = False) -> CountingJob:

        def run(backend: Backend) -> Coroutine[int]:
            rank, size = self._queue.group.rank, self._queue.group.size
            # Writing through .data does not count as a change of the buffer.
            buffers = {name: buffer.data for name, buffer in self._buffers().items()}
            changed = self._packing is None or not self._packing.fits(list(buffers.values()))
            said = yield from backend.count_active(active + INCOMPLETE * changed)
            count = active_ranks(said)
            # Where all have joined, some may have dropped the module.
            if said >= INCOMPLETE and count:
                yield from self._compare(backend, buffers)
            if count:
                source = size - 1 if from_highest else 0
                if count < size:
                    # The active rank with the highest number.
                    highest = torch.tensor([rank if active else -1], device="cpu")
                    yield from backend.allreduce([highest], arithmetic_of(highest.dtype, ReduceOp.MAX, size, 1.0, 1.0))
                    source = int(highest)
                tensors = list(buffers.values())
                if self._packing is None or changed:
                    self._packing = Packing(tensors, [0] * len(tensors), row_by_row=True)
                operands = self._packing.pack(tensors, home=home_of(backend))
                pieces = [bytes_of(operand.flat) for operand in operands]
                yield from backend.gather(pieces, [source] * len(pieces))
                if source != rank:
                    self._packing.unpack(tensors, operands, [0])
            return count

        return run

    def _compare(self, backend: Backend, buffers: Mapping[str, Tensor]) -> Coroutine[None]:
        """Some rank has buffers of other shapes than before. Raises: MismatchError, on all ranks, where they differ."""
        group = self._queue.group
        forms = {name: str(TensorForm.of(each)) for name, each in buffers.items()}
        first = pickle.loads((yield from send_bytes(backend, pickle.dumps(forms), 0)))
        wrong = _unwritable(buffers)
        if wrong is None:
            found = find_differences(first, forms)
            wrong = None if not found else f"buffers differ from those of rank {group.ranks[0]}: {', '.join(found)}"
        mine = torch.tensor([-1 if wrong is None else group.rank], dtype=torch.int32, device="cpu")
        yield from backend.allreduce([mine], arithmetic_of(torch.int32, ReduceOp.MAX, group.size, 1.0, 1.0))
        source = int(mine)
        if source >= 0:
            text = bytes((yield from send_bytes(backend, (wrong or "").encode(), source))).decode()
            raise MismatchError(
                f"{_CALL}: rank {group.ranks[source]}: {text}. Keep them alike on every rank, or pass "
                "broadcast_buffers=False, which leaves buffers to each rank."
            )


def _unwritable(buffers: Mapping[str, Tensor]) -> str | None:
    try:
        for name, buffer in buffers.items():
            check_writable("forward, buffer", name, [buffer])
    except UsageError as error:
        return str(error).removesuffix(".")
    return None
