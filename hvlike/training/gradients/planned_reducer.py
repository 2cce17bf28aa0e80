"""Planned reduction: the same tensors, step after step, with no agreement message between the ranks.

    first finish()    the ranks propose what they have, and one plan follows for all (one negotiated request)
    mark_ready(i)     with a spare core: the last tensor of a bucket completes it, and complete buckets start at once,
                      in the order of the plan. Without: nothing starts before finish()
    finish(tensors)   starts what is left and drives it. A steady step is a guard and one job: nothing has changed that
                      could change a decision (PlanEpoch.value), and all tensors lie in memory as agreed

The tensors are reduced where they are. The plan has an op queue of its own, so its order is the plan's.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Sequence

import torch

from hvlike.backends.base import INCOMPLETE
from hvlike.backends.op_queue import OpQueue
from hvlike.collectives.api.sparse import start_sparse_sum
from hvlike.collectives.controller.trace import begin_wait
from hvlike.collectives.health.wait_for_graph import STEP
from hvlike.collectives.persistent.bucket import ActiveJob, ReductionSettings
from hvlike.collectives.persistent.schedule import GradientStreams, Schedule, gradient_streams_of, no_streams
from hvlike.collectives.requests.plan import BucketSizes, Entry, Plan, Proposal, choose_sizes
from hvlike.collectives.requests.process_set import ProcessSet
from hvlike.collectives.requests.request import find_call_site
from hvlike.collectives.session.context import current
from hvlike.collectives.session.joined_proxy import JoinedProxy, PersistentOperation, PlanProxy
from hvlike.collectives.session.process_set_state import ProcessSetState
from hvlike.system.system import system
from hvlike.training.gradients.early_starts import EarlyStarts, Mover, choose_mover
from hvlike.training.gradients.own_proposal import OwnProposal, is_sparse
from hvlike.transport.memory.own_memory import check_gradients


class PlannedReducer(PersistentOperation):
    def __init__(
        self,
        entries: Sequence[Entry],
        settings: ReductionSettings,
        *,
        name: str,
        process_set: ProcessSet | None = None,
        groups: int | Sequence[Sequence[int]] | None = None,
    ) -> None:
        """name: of no other reducer alive. groups: what is reduced together: a number of runs, or lists of entries."""
        super().__init__(name)
        context = current()
        self._set_state: ProcessSetState = context.find_set(process_set, "Planned reduction")
        self._settings = settings
        self._process_set = process_set
        self.absent: Collection[int] = ()
        self._streams = gradient_streams_of(entry.device for entry in entries)
        knobs, nodes = context.knobs, self._set_state.group.nodes
        on_device = self._streams is not None
        self._early = EarlyStarts(
            choose_mover(knobs.overlap, spare_core=context.overlaps, on_device=on_device),
            automatic=knobs.overlap is None and not on_device,
            several_nodes=len(nodes) > 1,
        )
        constants = self._set_state.queues.first.constants
        sizes = choose_sizes(
            knobs.bucket_bytes,
            knobs.first_bucket_bytes,
            overlaps=self.overlaps,
            on_device=on_device,
            nodes=nodes,
            slow_network=constants is not None and constants.is_slow,
        )
        self.proposal = OwnProposal(entries, groups, sizes)
        self.schedule: Schedule | None = None  # What is agreed; None before the first step
        # The epoch and the thread of the last step, where the next one need not look closely.
        self._steady_in: tuple[int, int] | None = None
        self._site = find_call_site()
        self._set_state.proxies.add(self)

    @property
    def active(self) -> int:
        """How many ranks took part in the last step with tensors of their own; 0 where that is not known."""
        return self.schedule.active if self.schedule is not None else 0

    @property
    def busy(self) -> bool:
        return bool(self._early.marked) or super().busy

    @property
    def overlaps(self) -> bool:
        """Whether buckets start during backward."""
        return self._early.mover is not Mover.NOTHING

    @property
    def wants_marks(self) -> bool:
        """True while every tensor is to be marked ready; else the first one of a step is enough."""
        return self.overlaps or self.schedule is None

    @property
    def is_steady(self) -> bool:
        return self._steady_in is not None and self._steady_in[0] == self._set_state.plan_epoch.value

    @property
    def last_to_arrive(self) -> int | None:
        """The entry that is ready last in a step; None where that is not known, or some are sparse or on a device."""
        schedule = self.schedule
        if schedule is None or not schedule.buckets or schedule.plan.sparse or self._streams is not None:
            return None
        return schedule.plan.buckets[-1][-1]

    def mark_ready(self, index: int, tensor: torch.Tensor) -> None:
        """Tensor `index` is final for this step; it may be reduced in place from now on. Any thread; does not block."""
        early = self._early
        with early.lock:
            early.marked[index] = tensor
            schedule, streams = self.schedule, self._streams
            bucket = early.bucket_of(index)
            if bucket is None or schedule is None or tensor.is_sparse or self._set_state.proxies.stands_in:
                return
            if streams is not None and schedule.is_on_device(index):
                # A tensor of a GPU is final once its stream has come to this point.
                streams.note(bucket, tensor)
            complete, moved_here = early.ready(bucket), early.mover is Mover.HOOKS
            if complete:
                if not complete.start:
                    self._running = []
                streams_of = no_streams if streams is None else streams.streams
                operation = schedule.start(complete, early.marked, streams=streams_of, wake=not moved_here)
                if operation is not None:
                    self._running.append(operation)
        if moved_here and self._is_running:
            current().fabric.loop.turn()

    def finish(self, tensors: Sequence[torch.Tensor], missing: Collection[int] = ()) -> dict[int, torch.Tensor]:
        """Reduce all tensors in place: one for each entry, and those that were marked ready. Collective; blocks.

        missing: the entries for which this rank has zeros as it has nothing; `absent`, after that: those of no rank.
        Returns the tensors that take the place of those that could not be reduced in place, by index.
        Raises: MismatchError when the ranks have different tensors, and all other HorovodInternalErrors.
        """
        self.absent = ()
        if self._settings.size == 1 and self._settings.prescale * self._settings.postscale == 1:
            self._early.marked = {}
            self.absent = missing
            return {}
        if self._step >= self._look_at:
            self._look_at_options()
        # First this: a thread that joins looks at it after it has said so, which begins an epoch.
        self._in_step = True
        try:
            epoch = (self._set_state.plan_epoch.value, threading.get_ident())
            schedule = self.schedule
            in_memory = schedule.in_memory(tensors) if schedule is not None and self._steady_in == epoch else None
            replaced: dict[int, torch.Tensor] = {}
            if schedule is None or in_memory is None:
                schedule, replaced = self._reduce_closely(tensors, missing)
            else:
                self._reduce_dense(schedule, tensors, in_memory, missing)
                if schedule.incomplete:
                    self.absent = schedule.absent
            if self._early.may_use_hooks:
                self._early.note_speed(slow=schedule.slow_network)
            if not schedule.plan.sparse and self._set_state.controller.positions.failure is None:
                self._steady_in = epoch
            self.served += 1
            return replaced
        finally:
            self._early.marked, self._in_step = {}, False
            if self._early.mover is Mover.NOTHING:
                self._early.started = 0
            else:
                self._early.expect_all()
            self._step += 1
            if self._streams is not None:
                self._streams.clear()

    def _reduce_closely(
        self, tensors: Sequence[torch.Tensor], missing: Collection[int]
    ) -> tuple[Schedule, dict[int, torch.Tensor]]:
        """Reduce tensors that may be others than last time: check them, and agree on a plan where there is none.

        Returns the plan, and what takes the place of tensors that were sparse.
        """
        self._steady_in = None
        self._set_state.proxies.check_present(self.name)
        if not self._early.started and self.proposal.follow_dtypes(tensors):
            self.close()
        check_gradients(tensors, self.proposal.name_of)
        schedule = self.schedule or self._agree(tensors)
        self._site = find_call_site()
        self._set_state.controller.tensor_queue.notice((STEP, self.name), self._site)
        replaced: dict[int, torch.Tensor] = {}
        totals = {}
        if schedule.plan.sparse or any(map(is_sparse, tensors)):
            replaced = _densify(tensors, schedule.plan)
            totals = {
                index: start_sparse_sum(tensors[index], f"{self.name}.{index}", self._settings, self._process_set)
                for index in schedule.plan.sparse
            }
            tensors = [replaced.get(index, tensor) for index, tensor in enumerate(tensors)]
        self._reduce_dense(schedule, tensors, None, missing)
        replaced |= {index: total() for index, total in totals.items()}
        if schedule.incomplete:
            self.absent = schedule.absent
        elif not schedule.buckets:
            # Nothing has carried the count: what has no element is taken for nothing, on all ranks alike.
            self.absent = [index for index, total in replaced.items() if not total._nnz()]
        return schedule, replaced

    def resize(self, sizes: BucketSizes) -> None:
        """Reduce in buckets of other sizes from the next step on; every rank after the same step. Local."""
        if sizes != self.proposal.sizes:
            self.proposal.sizes = sizes
            self.close()

    def drop(self) -> None:
        """Forget what was agreed, and the step that has begun: the owner will not use it again. Local."""
        with self._early.lock:
            self._early.marked.clear()
        self.close()

    def forget(self) -> None:
        super().forget()
        self.schedule = self._steady_in = None
        self._early.follow(None)

    # -- what a join needs ----------------------------------------------------------------------

    def check_can_join(self) -> None:
        """Do nothing: zeros stand in."""

    def has_no_more_data(self) -> None:
        """Nothing is to be done: what stands in has tensors of its own."""

    def proxy(self) -> JoinedProxy:
        assert self.schedule is not None
        return PlanProxy(self.schedule)

    def adopt(self, queue: OpQueue, agreed: Proposal) -> JoinedProxy:
        return PlanProxy(self._follow(queue, agreed))

    # -- the plan -------------------------------------------------------------------------------

    def _agree(self, tensors: Sequence[torch.Tensor]) -> Schedule:
        """Propose what this rank has; the schedule that all ranks derive from all proposals."""
        proposal = self.proposal.of(tensors, self._early.marked, self._settings)
        home = None if self._streams is None else self._streams.home
        queue, agreed = self._agree_on_queue("plan", proposal, home)
        group = self._set_state.group
        self.proposal.compare_starts(agreed, self.name, group.ranks, warns=group.rank == 0)
        return self._follow(queue, agreed)

    def _follow(self, queue: OpQueue, agreed: Proposal) -> Schedule:
        schedule = self.schedule = Schedule(agreed, queue, self._settings)
        self.queue, self.serial = queue, agreed.serial
        self._early.follow(schedule.plan)
        return schedule

    # -- one step -------------------------------------------------------------------------------

    def _reduce_dense(
        self,
        schedule: Schedule,
        tensors: Sequence[torch.Tensor],
        in_memory: Sequence[list[ActiveJob]] | None,
        missing: Collection[int],
    ) -> None:
        controller, step = self._set_state.controller, self._step + 1
        controller.positions.entered[self.name] = step
        controller.tensor_queue.last = ((STEP, self.name), self._site, system.monotonic())
        queue, began = schedule.queue, system.monotonic()
        row = begin_wait(queue, self.name, self._step) if queue.recorder.on else None
        try:
            with self._early.lock:
                rest = self._early.start_rest()
            if not rest.start:
                self._running = []
            said = 1 + INCOMPLETE * bool(missing)
            streams_of = no_streams if self._streams is None else self._streams.streams
            operation = schedule.start(rest, tensors, said, missing, in_memory, streams_of, drive=True)
            if operation is not None:
                self._running.append(operation)
            if self._running and not self._running[-1].done():
                self._wait_in_step(step, self._site, schedule.described)
        except BaseException:
            self.close()
            raise
        finally:
            if row is not None:
                queue.recorder.end(row)
            queue.counters.waited(self.name, system.monotonic() - began)
        running, self._running = self._running, []
        for operation in running:
            if operation.error is not None:
                self.close()
                raise operation.error
        if self._streams is not None:
            self._leave_streams(self._streams, schedule)

    def _leave_streams(self, streams: GradientStreams, schedule: Schedule) -> None:
        error = streams.leave(schedule.device)
        if error is not None:
            self.close()
            raise error


def _densify(tensors: Iterable[torch.Tensor], plan: Plan) -> dict[int, torch.Tensor]:
    """Sparse tensors where the plan has dense ones are reduced as dense ones and take their place."""
    return {
        index: tensor.detach().to_dense()
        for index, tensor in enumerate(tensors)
        if tensor.is_sparse and index not in plan.sparse
    }
