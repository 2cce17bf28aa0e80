"""All ranks have the same module: compared and broadcast at the start, buffers broadcast at each forward.

Buffers are many small tensors of any dtypes. They travel as one piece of bytes; large ones travel as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.backends.base import Backend
from hvlike.backends.cuda.device_jobs import home_of
from hvlike.collectives.persistent.planned_queue import PlannedQueue
from hvlike.collectives.requests.process_set import ProcessSet
from hvlike.collectives.requests.reduction import Operand, arithmetic_of
from hvlike.collectives.session.context import Context
from hvlike.collectives.session.joined_proxy import CountingJob
from hvlike.errors import MismatchError
from hvlike.training.gradients.parameters import gpu_of
from hvlike.training.state.broadcast import broadcast_tensors, check_same
from hvlike.training.state.tensor_pickle import TensorForm
from hvlike.transport.loop.coroutine import Coroutine

_CALL = "DistributedDataParallel"


def verify_and_broadcast(
    parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], root_rank: int, process_set: ProcessSet | None
) -> None:
    """Check that the ranks have the same parameters and buffers, and give them the values of those of the root.

    root_rank: global rank. Collective over the process set; blocks.
    Raises: MismatchError on every rank, naming the ranks and what differs; nothing has been changed then.
    """
    forms = {f"parameter {name}": _describe(tensor) for name, tensor in parameters.items()}
    forms |= {f"buffer {name}": str(TensorForm.of(tensor)) for name, tensor in buffers.items()}
    check_same(f"{_CALL} expects same model across all ranks", forms, root_rank, process_set, MismatchError)
    give(parameters, buffers, root_rank, process_set)


def give(
    parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], root_rank: int, process_set: ProcessSet | None
) -> None:
    """Copy the root's parameters and buffers into those of all ranks. Collective over the process set; blocks."""
    broadcast_tensors(_CALL, {**parameters, **buffers}, root_rank, process_set)


def _describe(parameter: Tensor) -> str:
    frozen = "" if parameter.requires_grad else " without gradient"
    return f"{TensorForm.of(parameter)} strides {list(parameter.stride())}{frozen}"


SMALL_BYTES = 64 << 10
"""What is copied together; beyond it a copy costs more than a message of its own."""

_ALIGNMENT = 16


class FlatBuffers:
    """Pieces of bytes that hold a list of tensors, made for the shapes and dtypes of the first one seen."""

    def __init__(self, tensors: Sequence[Tensor], home: torch.device | None = None) -> None:
        """home: the device that the pieces travel from, None for host memory."""
        self._home = home
        self._forms = _shapes_and_dtypes(tensors)
        small = [each for each in tensors if each.nbytes <= SMALL_BYTES]
        starts = [0]
        for each in small:
            starts.append(starts[-1] + math.ceil(each.nbytes / _ALIGNMENT) * _ALIGNMENT)
        with torch.inference_mode(False):
            self._together = torch.zeros(starts[-1], dtype=torch.uint8, device=home or "cpu")
            self._views = [
                self._together[start : start + each.nbytes].view(each.dtype).view(each.shape)
                for start, each in zip(starts, small, strict=False)
            ]
        self._small: list[Tensor] = []
        self._large: list[Operand] = []

    def fit(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these tensors have the shapes and dtypes this was made for."""
        return self._forms == _shapes_and_dtypes(tensors)

    def gather(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the pieces that hold these tensors now, flat."""
        self._small = [each for each in tensors if each.nbytes <= SMALL_BYTES]
        self._large = [Operand(each, None, home=self._home) for each in tensors if each.nbytes > SMALL_BYTES]
        torch._foreach_copy_(self._views, self._small)
        return [self._together, *(each.flat.view(torch.uint8) for each in self._large)]

    def scatter(self) -> None:
        """Give the tensors of the last `gather` what the pieces hold by now."""
        torch._foreach_copy_(self._small, self._views)
        for each in self._large:
            each.write_back()


def _shapes_and_dtypes(tensors: Sequence[Tensor]) -> list[tuple[torch.Size, torch.dtype]]:
    return [(each.shape, each.dtype) for each in tensors]


Find = Callable[[], Sequence[tuple[str, Tensor]]]


class BufferSync:
    """Gives all ranks the buffers of one: the first, or in a Join context the highest that has not left it.

    Whoever has joined stands in: it contributes nothing and gets the buffers too.
    """

    def __init__(self, context: Context, process_set: ProcessSet | None, find: Find) -> None:
        """find: the buffers of now, with their names; a module may replace them. Local."""
        group = context.set_state(process_set, "DistributedDataParallel").group
        self.context = context
        """The hvlike that it works in."""
        self._find = find
        self._rank = group.rank
        self._size = group.size
        self._copies: FlatBuffers | None = None
        described = {f"shape and dtype of buffer {name!r}": str(TensorForm.of(each)) for name, each in find()}
        device = gpu_of(buffer for _, buffer in find())
        self._lane = PlannedQueue("DistributedDataParallel buffers", process_set, described, device=device)
        self._lane.stand_in = lambda: self._job(active=False, owner=-1)

    def agree(self) -> None:
        """Open the lane. Collective over the process set; blocks. Raises: MismatchError on every rank."""
        self._lane.agree()

    def sync(self, *, from_highest: bool) -> None:
        """Take over the buffers of one rank. Collective over the process set; blocks.

        from_highest: the active rank with the highest number has them, as in torch's Join; else the first one.
        Versions of the buffers do not change: graphs that have saved them stay valid.
        """
        self._lane.run(self._job(active=True, owner=self._size - 1 if from_highest else 0))

    def _job(self, *, active: bool, owner: int) -> CountingJob:
        """owner: where all ranks are active."""

        def run(plane: Backend) -> Coroutine[int]:
            plane.begin_count(active=active)
            count = yield from plane.end_count()
            if count:
                source = owner if count == self._size else (yield from self._highest(plane, active))
                # What is written through .data does not count as a change of the buffer.
                buffers = [buffer.data for _, buffer in self._find()]
                if self._copies is None or not self._copies.fit(buffers):
                    self._copies = FlatBuffers(buffers, home_of(plane))
                pieces = self._copies.gather(buffers)
                yield from plane.gather(pieces, [source] * len(pieces))
                if source != self._rank:
                    self._copies.scatter()
            return count

        return run

    def _highest(self, plane: Backend, active: bool) -> Coroutine[int]:
        """The active rank with the highest number."""
        candidate = torch.tensor([self._rank if active else -1], device="cpu")
        yield from plane.allreduce([candidate], arithmetic_of(candidate.dtype, ReduceOp.MAX, self._size, 1.0, 1.0))
        return int(candidate)
