"""A planned lane: jobs of one purpose, step after step, with no message between the ranks but the data itself.

    agree()     all ranks say what they take for granted; where it is the same, a lane is theirs
    run(job)    every rank runs its job of this step on the lane; in the same order everywhere, as that order is the
                only agreement
    stand_in()  makes the job of a rank that has joined (hvd.join, a Join context): it runs again and again, in the
                loop, until a step has no active rank

A job says at its beginning whether its rank is active (`plane.begin_count`), and returns what `plane.end_count` says.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from hvlike.collectives.compression import Mark
from hvlike.collectives.context import Context, current, is_running
from hvlike.collectives.lane_agreement import agree_on_lane
from hvlike.collectives.lane_proposal import LaneProposal
from hvlike.collectives.membership import Membership
from hvlike.collectives.places import place_of_caller
from hvlike.collectives.process_set import ProcessSet
from hvlike.collectives.shadow import CountingJob, LaneShadow, Shadow
from hvlike.collectives.trace import Exposed, recorded
from hvlike.collectives.waits import STEP
from hvlike.errors import UsageError
from hvlike.planes.cuda.jobs import on_device
from hvlike.planes.cuda.runtime import kind_of, runtime_of
from hvlike.planes.lane import Job, Lane
from hvlike.planes.plane import Plane
from hvlike.transport.routine import Routine
from hvlike.transport.task import Task

ADVICE = "Build it with the same arguments on every rank."


class LaneStep:
    """One step on a planned lane."""

    def __init__(self, owner: PlannedLane, number: int) -> None:
        self._owner = owner
        self._number = number
        self.active = 0
        """How many ranks were active in it; valid once it has ended."""
        self.ended = False
        self.error: BaseException | None = None

    def result(self) -> int:
        """Wait until the step has ended; how many ranks were active in it. Raises: as PlannedLane.run."""
        self._owner.wait_for(self, self._number)
        if self.error is not None:
            raise self.error
        return self.active


class PlannedLane:
    """A lane of its own for one purpose that all ranks of a set share; see the head of this file."""

    def __init__(
        self,
        name: str,
        process_set: ProcessSet | None = None,
        described: Mapping[str, Any] | None = None,
        *,
        advice: str = ADVICE,
        device: torch.device | None = None,
    ) -> None:
        """Local.

        name: what it is for; numbered at the first `agree`, which all ranks make in the same order.
        described: what must be equal on all ranks, by what it is; compared and shown as str(value).
        advice: how to make them so, a sentence for the error.
        device: where the tensors of the jobs are, if that is a GPU: jobs then run on its plane, and `result` makes the
            current stream wait for them.
        """
        self.name = name
        self.stand_in: Callable[[], CountingJob] | None = None
        """Makes the job of one step of a rank that has joined; called and run in the loop."""
        self.served = 0
        """Steps that have ended since the last agreement: the same on every rank after a step."""
        self._purpose = name
        self._process_set = process_set
        self._described = tuple((key, str(value)) for key, value in (described or {}).items())
        self._advice = advice
        self._device = device
        self._kind = "" if device is None else kind_of(device)
        self._context: Context | None = None
        self._membership: Membership | None = None
        self._lane: Lane | None = None
        self._serial: int | None = None
        self._release: weakref.finalize[Any, PlannedLane] | None = None
        self._lock = threading.Lock()
        self._step = 0
        self._unfinished = 0

    @property
    def busy(self) -> bool:
        """True while a step is under way on this rank."""
        return self._unfinished > 0

    @property
    def serial(self) -> int | None:
        """The number of the agreed plan; None while there is none."""
        return self._serial

    def agree(self) -> None:
        """Open the lane, unless it is there. Collective over the process set; blocks.

        After a join all planned lanes are forgotten; then the next step agrees by itself.
        Raises: MismatchError, on every rank, where `described` differs; UsageError for a process set this rank is not
            in; PeerLeftError, ShutdownError.
        """
        if not (is_running() and current() is self._context):
            self._enter_context()
        membership = self._membership
        if self._lane is not None or membership is None:
            return
        proposal = LaneProposal(self._described, self._advice, device=self._kind)
        lane, agreed = agree_on_lane(membership, "lane", self.name, proposal, self._device)
        self._release = weakref.finalize(self, membership.lanes.give_back, lane.number)
        self._lane, self._serial = lane, agreed.serial
        membership.shadows.planned.add(self)

    def run(self, job: CountingJob) -> int:
        """Run this rank's job of the next step, and wait for its end; how many ranks were active in it.

        Collective over the process set. Blocks.
        Raises: the error of the job; PeerLeftError, DeadlockError, ShutdownError (HorovodInternalErrors). After an
            error the lane is lost, on every rank; the next step opens another one.
        """
        return self.start(job, wake=False).result()

    def start(self, job: CountingJob, *, wake: bool = True) -> LaneStep:
        """The same without waiting, but for the first step after a join. `wake=False`: the caller waits at once."""
        self.agree()
        lane, membership = self._lane, self._membership
        assert lane is not None
        assert membership is not None
        self._step += 1
        membership.negotiator.steps[self.name] = self._step
        step = LaneStep(self, self._step)

        def run(plane: Plane) -> Routine[None]:
            step.active = yield from job(plane)

        work: Job = run
        runtime = runtime_of(self._kind)
        if runtime is not None and self._device is not None:
            work = on_device(lane, None, run, [runtime.record(runtime.current_stream(self._device))])
        if lane.recorder.on:
            work = recorded(lane.recorder, lane, self.name, {"step": self._step}, [], work)
        with self._lock:
            self._unfinished += 1
        lane.submit(work, lambda task: self._ended(step, task), wake=wake)
        return step

    def wait_for(self, step: LaneStep, number: int) -> None:
        """Wait until a step has ended; reports and the search for deadlocks know of it."""
        membership, lane = self._membership, self._lane
        if not step.ended and membership is not None and lane is not None:
            negotiator = membership.negotiator
            key = (STEP, self.name)
            negotiator.enter_step(key, number, place_of_caller(), "", self.fail)
            membership.rounds.check_step(self.name, number, self.fail)
            try:
                with Exposed(lane, self.name, number):
                    negotiator.wait(key, lambda: step.ended, None)
            finally:
                negotiator.leave_step(key)
        if step.error is None and self._kind and lane is not None and lane.device is not None:
            lane.device.fence()()
        if step.error is not None:
            # The lane is lost with the job that failed; the next step starts on a new one.
            self.close()

    def close(self) -> None:
        """Forget what was agreed; the next step agrees anew. Local; nothing may be in flight."""
        if self._release is not None:
            self._release()
        self.forget()

    # -- what a join needs ----------------------------------------------------------------------

    def mark(self) -> Mark:
        """See Planned: nothing is remembered that the ranks need to compare."""
        if self.stand_in is None:
            raise UsageError(
                f"{self.name!r} is in use on this rank, and cannot go on without it: a rank that has no more data "
                "cannot join while it exists."
            )
        return Mark()

    @property
    def healthy(self) -> bool:
        """The agreed lane has had no error."""
        return self._lane is not None and self._lane.broken is None

    def shadow(self) -> Shadow:
        """See Planned."""
        lane, serial, stand_in = self._lane, self._serial, self.stand_in
        assert lane is not None
        assert serial is not None
        assert stand_in is not None
        return LaneShadow(lane, serial, stand_in, on_device=bool(self._kind))

    def adopt(self, lane: Lane, agreed: LaneProposal) -> Shadow:
        """See Planned."""
        stand_in = self.stand_in
        assert stand_in is not None
        self._lane, self._serial = lane, agreed.serial
        return LaneShadow(lane, agreed.serial, stand_in, on_device=bool(self._kind))

    def fail(self, error: BaseException) -> None:
        """End a step that can never be completed; in the loop."""
        if self._lane is not None:
            self._lane.fail(error)

    def forget(self) -> None:
        """Forget what was agreed and count steps anew; what becomes of the lane is up to the caller."""
        if self._release is not None:
            self._release.detach()
        self._release = None
        self._lane = None
        self._serial = None
        self.served = 0
        self._step = 0

    # -------------------------------------------------------------------------------------------

    def _enter_context(self) -> None:
        """Belong to the hvlike that runs now; an earlier one has taken its lane with it."""
        self.forget()
        self._context = current()
        membership = self._membership = self._context.membership(self._process_set, self._purpose)
        self.name = f"{self._purpose}.{membership.negotiator.optimizer_names.draw(self._purpose)}"

    def _ended(self, step: LaneStep, task: Task[None]) -> None:
        step.error = task.error
        with self._lock:
            self._unfinished -= 1
        if task.error is None:
            self.served += 1
        step.ended = True
