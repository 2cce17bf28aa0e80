"""The buffers of a module: those of one rank become those of all, on a planned lane."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hvlike.collectives.context import Context
from hvlike.collectives.planned_lane import PlannedLane
from hvlike.collectives.process_set import ProcessSet
from hvlike.collectives.reductions import arithmetic_of
from hvlike.collectives.shadow import CountingJob
from hvlike.planes.cuda.jobs import home_of
from hvlike.planes.ops import ReduceOp
from hvlike.planes.plane import Plane
from hvlike.training.ddp.flat_copies import FlatCopies
from hvlike.training.places import gpu_of
from hvlike.training.tensor_pickle import TensorForm
from hvlike.transport.routine import Routine

Find = Callable[[], Sequence[tuple[str, Tensor]]]


class Buffers:
    """Gives all ranks the buffers of one: the first, or in a Join context the highest that has not left it.

    Whoever has joined stands in: it contributes nothing and gets the buffers too.
    """

    def __init__(self, context: Context, process_set: ProcessSet | None, find: Find) -> None:
        """find: the buffers of now, with their names; a module may replace them. Local."""
        group = context.membership(process_set, "DistributedDataParallel").group
        self.context = context
        """The hvlike that it works in."""
        self._find = find
        self._rank = group.rank
        self._size = group.size
        self._copies: FlatCopies | None = None
        described = {f"shape and dtype of buffer {name!r}": str(TensorForm.of(each)) for name, each in find()}
        device = gpu_of(buffer for _, buffer in find())
        self._lane = PlannedLane("DistributedDataParallel buffers", process_set, described, device=device)
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

        def run(plane: Plane) -> Routine[int]:
            plane.begin_count(active=active)
            count = yield from plane.end_count()
            if count:
                source = owner if count == self._size else (yield from self._highest(plane, active))
                # What is written through .data does not count as a change of the buffer.
                buffers = [buffer.data for _, buffer in self._find()]
                if self._copies is None or not self._copies.fit(buffers):
                    self._copies = FlatCopies(buffers, home_of(plane))
                pieces = self._copies.gather(buffers)
                yield from plane.gather(pieces, [source] * len(pieces))
                if source != self._rank:
                    self._copies.scatter()
            return count

        return run

    def _highest(self, plane: Plane, active: bool) -> Routine[int]:
        """The active rank with the highest number."""
        candidate = torch.tensor([self._rank if active else -1], device="cpu")
        yield from plane.allreduce([candidate], arithmetic_of(candidate.dtype, ReduceOp.MAX, self._size, 1.0, 1.0))
        return int(candidate)
