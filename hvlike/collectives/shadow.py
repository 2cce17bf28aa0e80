"""What takes part in a planned operation of the others for a rank that has joined. Lives in the loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from hvlike.collectives.compression import Mark
from hvlike.collectives.schedule import Schedule
from hvlike.errors import ShutdownError
from hvlike.planes.cuda.jobs import on_device
from hvlike.planes.lane import Lane
from hvlike.planes.plane import Plane
from hvlike.transport.routine import Routine
from hvlike.transport.task import Task

CountingJob = Callable[[Plane], Routine[int]]
"""What a rank does on a lane in one step; returns how many ranks were active in it, as `end_count` says."""

Keep = Callable[[Mapping[int, torch.Tensor], int], None]
"""Told, in the loop, the reduced tensors of a step by entry, and how many ranks were active in it."""


class Shadow(ABC):
    """Runs the steps of one plan, until a step has no active rank."""

    def __init__(self, lane: Lane, serial: int) -> None:
        """serial: the number of the plan."""
        self.lane = lane
        self.serial = serial
        self.finished = False
        self.error: BaseException | None = None
        self.steps = 0
        """Steps with an active rank: those that this rank has missed."""

    @abstractmethod
    def begin(self) -> None:
        """Enter the next step; it ends when all ranks have entered it."""

    def cancel(self) -> None:
        """Leave for good: the others have given this plan up."""
        self.stop(ShutdownError("the ranks that go on have given this planned operation up"))

    def stop(self, error: BaseException) -> None:
        """Leave for good because of `error`."""
        if not self.finished:
            self.finished = True
            self.lane.fail(error)

    def fail(self, error: BaseException) -> None:
        """This rank can no longer stand in."""
        self.error = self.error or error
        self.stop(error)


class PlanShadow(Shadow):
    """Contributes zeros to a planned reduction."""

    def __init__(self, schedule: Schedule, keep: Keep | None = None) -> None:
        """keep: told the results of every step; without it they are dropped."""
        super().__init__(schedule.lane, schedule.serial)
        self.finished = not schedule.buckets
        self._schedule = schedule
        self._keep = keep
        with schedule.in_stream():
            self._tensors = [schedule.zeros(number) for number in range(len(schedule.buckets))]
        self._left = 0

    def begin(self) -> None:
        """See Shadow."""
        self._left = len(self._tensors)
        for number, tensors in enumerate(self._tensors):
            if not self._schedule.start(number, tensors, self._ended, active=False, wake=False):
                self._left -= 1

    def _ended(self, task: Task[None]) -> None:
        self._left -= 1
        self.error = self.error or task.error
        if self._left or self.finished:
            return
        if self.error is not None or not self._schedule.active:
            self.finished = True
            self._schedule.roll_back()
            return
        self.steps += 1
        self._schedule.commit()
        with self._schedule.in_stream():
            if self._keep is not None:
                try:
                    self._keep(self._results(), self._schedule.active)
                except Exception as error:
                    self.fail(error)
                    return
            for tensors in self._tensors:
                for tensor in tensors:
                    tensor.zero_()
        self.begin()

    def _results(self) -> dict[int, torch.Tensor]:
        return {
            index: tensor
            for bucket, tensors in zip(self._schedule.plan.buckets, self._tensors, strict=True)
            for index, tensor in zip(bucket, tensors, strict=True)
        }


class LaneShadow(Shadow):
    """Runs on a planned lane what its owner has for a rank that has joined."""

    def __init__(
        self, lane: Lane, serial: int, stand_in: Callable[[], CountingJob], *, on_device: bool = False
    ) -> None:
        """stand_in: makes the job of a step. on_device: it runs on the plane of the lane's device."""
        super().__init__(lane, serial)
        self._on_device = on_device
        self._stand_in = stand_in
        self._active = 0

    def begin(self) -> None:
        """See Shadow."""
        try:
            job = self._stand_in()
        except Exception as error:
            self.fail(error)
            return

        def run(plane: Plane) -> Routine[None]:
            self._active = yield from job(plane)

        self.lane.submit(on_device(self.lane, None, run) if self._on_device else run, self._ended, wake=False)

    def _ended(self, task: Task[None]) -> None:
        self.error = self.error or task.error
        if self.finished:
            return
        if self.error is not None or not self._active:
            self.finished = True
            return
        self.steps += 1
        self.begin()


class Planned(Protocol):
    """What agrees once with the other ranks and then runs step after step on a lane of its own."""

    name: str

    @property
    def busy(self) -> bool:
        """True while a step is under way on this rank."""

    @property
    def serial(self) -> int | None:
        """The number of the agreed plan; None while there is none."""

    @property
    def healthy(self) -> bool:
        """There is an agreed plan, and it has had no error."""

    def mark(self) -> Mark:
        """What is remembered from step to step, in short."""

    def shadow(self) -> Shadow:
        """What takes part in the agreed plan while this rank has joined. In the loop."""

    def adopt(self, lane: Lane, agreed: Any) -> Shadow:
        """The others have agreed anew while this rank has joined: what takes part in that. In the loop."""

    def fail(self, error: BaseException) -> None:
        """End a step that can never be completed; in the loop."""

    def forget(self) -> None:
        """Forget the plan; what becomes of its lane is up to the caller."""
