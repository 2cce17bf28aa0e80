"""One step of an agreed plan, compiled: everything that stays the same from step to step is decided beforehand.

    compile_step(schedule, ...)   after a step of the general path: which tensors make a part, how they must lie in
                                  memory, which prepared reduction takes them, what is counted and reported where
    CompiledStep.run(tensors)     a guard, and one prepared run for each part, driven by the calling thread

The guard is one integer, `PlanEpoch.value`: whatever could change a decision (a timeline, a failed Join context, a
broken queue, a shutdown) advances it. Where it has moved, or where a gradient lies otherwise in memory than agreed,
nothing has begun, and the general path runs the step and compiles anew. The two paths of different ranks fit
together: both run the same prepared reductions.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import torch

from hvlike.backends.op_queue import OpQueue
from hvlike.collectives.controller.controller import Controller
from hvlike.collectives.fusion.bucket import PlannedPart
from hvlike.collectives.fusion.schedule import PLANNED, Schedule
from hvlike.collectives.requests.request import CallSite, RequestKey
from hvlike.transport.fabric import PlanEpoch
from hvlike.transport.loop.coroutine import Coroutine, Task

_address = torch.Tensor.data_ptr


class CompiledStep:
    def __init__(
        self,
        schedule: Schedule,
        parts: Sequence[PlannedPart],
        key: RequestKey,
        epoch: PlanEpoch,
        controller: Controller,
    ) -> None:
        self.thread = threading.get_ident()
        self.epoch = epoch.value
        """Of the guard, when this was compiled."""
        self._key = key
        self._schedule = schedule
        self._parts = parts
        self._queue: OpQueue = schedule.queue
        self._steps = controller.steps
        self._began = 0.0
        self._tensor_queue = controller.tensor_queue
        self._counts = schedule.queue.counters.of_steps(key[1], PLANNED, schedule.sizes())

    def run(
        self, tensors: Sequence[torch.Tensor], step: int, site: CallSite, after: Callable[[Task[None]], None]
    ) -> bool | None:
        """Reduce the tensors in place, one for each entry of the plan. Collective; does not sleep.

        Args:
            tensors: The gradients of this step.
            step: Its number.
            site: Where the program asks for it.
            after: Called in the loop at the end of what was left to it.

        Returns:
            True when all is reduced, False when a peer lets this rank wait and the rest was left to the loop, None when
            nothing has begun because a tensor does not lie in memory as agreed.

        Raises:
            HorovodInternalError: A peer has left, or reduces something else. The queue is broken then.
        """
        began = self._began = time.monotonic()
        picked = []
        for part in self._parts:
            mine = part.pick(tensors)
            if not part.fits(mine):
                return None
            picked.append(mine)
        self._steps[self._key[1]] = step
        self._tensor_queue.last = (self._key, site, began)
        try:
            if not self._queue.drive(self._coroutine(picked), after):
                return False
        except BaseException as error:
            # The ranks no longer agree on where they are.
            self._queue.broken = self._queue.broken or error
            raise
        self.count()
        return True

    def count(self) -> None:
        counts, seconds = self._counts, time.monotonic() - self._began
        counts.steps += 1
        counts.seconds += seconds
        counts.last_seconds = seconds
        if seconds > counts.longest_seconds:
            counts.longest_seconds = seconds

    def _coroutine(self, picked: Sequence[Sequence[torch.Tensor]]) -> Coroutine[None]:
        """The prepared reductions in the order of the plan; the first one counts the active ranks."""
        first = True
        for part, tensors in zip(self._parts, picked, strict=True):
            active = yield from part.reduction.run(list(map(_address, tensors)), True, tensors)
            if first:
                self._schedule.active = active
                first = False


def compile_step(schedule: Schedule, key: RequestKey, epoch: PlanEpoch, controller: Controller) -> CompiledStep | None:
    """Compile the step of a plan that has just run; None where it has to stay with the general path.

    That is for tensors on a device or on several nodes, sparse ones, compressors with a memory, casts, Adasum, a
    timeline that records, and a queue that is broken.
    """
    queue = schedule.queue
    if not queue.drives or queue.recorder.on or queue.broken is not None or schedule.plan.sparse:
        return None
    parts = schedule.parts()
    return None if parts is None else CompiledStep(schedule, parts, key, epoch, controller)
