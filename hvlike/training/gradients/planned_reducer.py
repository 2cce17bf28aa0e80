"""Planned reduction: the same tensors, step after step, with no agreement message between the ranks.

    first finish()    the ranks propose what they have, and one plan follows for all (one negotiated request)
    mark_ready(i)     with a spare core: the last tensor of a bucket completes it, and complete buckets start at once,
                      in the order of the plan. Without: nothing starts before finish()
    finish(tensors)   starts what is left and drives it. A steady step is a guard and one job: nothing has changed that
                      could change a decision (PlanEpoch.value), and all tensors lie in memory as agreed

The tensors are reduced where they are. The plan has an op queue of its own, so its order is the plan's.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

import torch

from hvlike.backends.base import INCOMPLETE
from hvlike.backends.cuda.runtime import kind_of
from hvlike.backends.op_queue import OpQueue
from hvlike.collectives.api.sparse import start_sparse_sum
from hvlike.collectives.compression import Mark
from hvlike.collectives.controller.trace import begin_wait
from hvlike.collectives.health.wait_for_graph import STEP
from hvlike.collectives.persistent.bucket import ActiveJob, ReductionSettings
from hvlike.collectives.persistent.schedule import GradientStreams, Schedule, gradient_streams_of, no_streams
from hvlike.collectives.requests.plan import BucketSizes, Entry, Plan, Proposal, choose_sizes, equal_parts
from hvlike.collectives.requests.process_set import ProcessSet
from hvlike.collectives.requests.request import find_call_site, order_in_memory
from hvlike.collectives.session.context import current
from hvlike.collectives.session.joined_proxy import JoinedProxy, PersistentOperation, PlanProxy
from hvlike.collectives.session.process_set_state import ProcessSetState
from hvlike.system.system import system
from hvlike.training.gradients.early_starts import EarlyStarts, Mover, choose_mover
from hvlike.transport.memory.dtypes import dtype_name
from hvlike.transport.memory.own_memory import check_gradients

_log = logging.getLogger("hvlike")

_is_sparse: Callable[[torch.Tensor], bool] = attrgetter("is_sparse")
_dtype: Callable[[torch.Tensor], torch.dtype] = attrgetter("dtype")


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
        self._entries = list(entries)
        self._set_state: ProcessSetState = current().find_set(process_set, "Planned reduction")
        self._settings = settings
        self._groups = equal_parts(len(self._entries), groups) if isinstance(groups, int) else list(groups or [])
        self._process_set = process_set
        self._marked: dict[int, torch.Tensor] = {}
        self.absent: Collection[int] = ()
        self._arrivals = gradient_streams_of(entry.device for entry in entries)
        self._streams = no_streams if self._arrivals is None else self._arrivals.streams
        knobs, nodes = current().knobs, self._set_state.group.nodes
        on_device = self._arrivals is not None
        self._early = EarlyStarts(
            choose_mover(knobs.overlap, spare_core=current().overlaps, on_device=on_device),
            automatic=knobs.overlap is None and not on_device,
            several_nodes=len(nodes) > 1,
        )
        constants = self._set_state.queues.first.constants
        self.sizes = choose_sizes(
            knobs.bucket_bytes,
            knobs.first_bucket_bytes,
            overlaps=self.overlaps,
            on_device=on_device,
            nodes=nodes,
            slow_network=constants is not None and constants.is_slow,
        )
        self.start: Mapping[str, int] = {}  # Checksums by name, to warn where the ranks start apart
        self.schedule: Schedule | None = None  # What is agreed; None before the first step
        self._lock = system.Lock()
        # The epoch and the thread of the last step, where the next one need not look closely.
        self._steady_in: tuple[int, int] | None = None
        self._epoch = self._set_state.plan_epoch
        self._site = find_call_site()
        self._set_state.proxies.add(self)

    @property
    def active(self) -> int:
        """How many ranks took part in the last step with tensors of their own; 0 where that is not known."""
        return self.schedule.active if self.schedule is not None else 0

    @property
    def busy(self) -> bool:
        return bool(self._marked) or super().busy

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
        return self._steady_in is not None and self._steady_in[0] == self._epoch.value

    @property
    def last_to_arrive(self) -> int | None:
        """The entry that is ready last in a step; None where that is not known, or some are sparse or on a device."""
        schedule = self.schedule
        if schedule is None or not schedule.buckets or schedule.plan.sparse or self._arrivals is not None:
            return None
        return schedule.plan.buckets[-1][-1]

    def mark_ready(self, index: int, tensor: torch.Tensor) -> None:
        """Tensor `index` is final for this step; it may be reduced in place from now on. Any thread; does not block."""
        with self._lock:
            self._marked[index] = tensor
            early, schedule = self._early, self.schedule
            bucket = early.bucket_of(index)
            if bucket is None or schedule is None or tensor.is_sparse or self._set_state.proxies.stands_in:
                return
            if self._arrivals is not None and schedule.is_on_device(index):
                # A tensor of a GPU is final once its stream has come to this point.
                self._arrivals.note(bucket, tensor)
            complete, moved_here = early.ready(bucket), early.mover is Mover.HOOKS
            if complete:
                if not complete.start:
                    self._running = []
                operation = schedule.start(complete, self._marked, streams=self._streams, wake=not moved_here)
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
            self._marked.clear()
            self.absent = missing
            return {}
        if self._step >= self._look_at:
            self._look_at_options()
        # First this: a thread that joins looks at it after it has said so, which begins an epoch.
        self._in_step = True
        try:
            epoch = (self._epoch.value, threading.get_ident())
            schedule = self.schedule
            replaced: dict[int, torch.Tensor] = {}
            in_memory = schedule.in_memory(tensors) if schedule is not None and self._steady_in == epoch else None
            totals: dict[int, Callable[[], torch.Tensor]] = {}
            if schedule is None or in_memory is None:
                self._steady_in = None
                schedule, replaced, totals = self._look_closely(tensors)
                tensors = [replaced.get(index, tensor) for index, tensor in enumerate(tensors)]
            self._reduce_dense(schedule, tensors, in_memory, missing)
            for index, total in totals.items():
                replaced[index] = total()
            if schedule.incomplete:
                self._note_absent(schedule, tensors)
            elif not schedule.buckets:
                # Nothing has carried the count: what has no element is taken for nothing, on all ranks alike.
                self.absent = [index for index, total in replaced.items() if not total._nnz()]
            if self._early.may_use_hooks:
                self._early.note_speed(slow=schedule.slow_network)
            if not schedule.plan.sparse and self._set_state.controller.positions.failure is None:
                self._steady_in = epoch
            self.served += 1
            return replaced
        finally:
            self._marked, self._in_step = {}, False
            if self._early.mover is Mover.NOTHING:
                self._early.started = 0
            else:
                self._early.expect_all()
            self._step += 1
            if self._arrivals is not None:
                self._arrivals.clear()

    def _look_closely(
        self, tensors: Sequence[torch.Tensor]
    ) -> tuple[Schedule, dict[int, torch.Tensor], dict[int, Callable[[], torch.Tensor]]]:
        """Check a step, and agree on a plan where there is none.

        Returns that, what takes the place of tensors that were sparse, and what gives the sums of those that stay it.
        """
        self._set_state.proxies.check_present(self.name)
        if not self._early.started:
            self._follow_dtypes(tensors)
        check_gradients(tensors, lambda place: self._entries[place].name)
        schedule = self.schedule or self._agree(tensors)
        self._site = find_call_site()
        self._set_state.controller.tensor_queue.notice((STEP, self.name), self._site)
        replaced: dict[int, torch.Tensor] = {}
        totals = {}
        if schedule.plan.sparse or any(map(_is_sparse, tensors)):
            replaced = _densify(tensors, schedule.plan)
            totals = {
                index: start_sparse_sum(tensors[index], f"{self.name}.{index}", self._settings, self._process_set)
                for index in schedule.plan.sparse
            }
        return schedule, replaced, totals

    def _follow_dtypes(self, tensors: Sequence[torch.Tensor]) -> None:
        """Agree anew where the program has changed the dtype of a gradient, on every rank. Local."""
        dtypes = list(map(_dtype, tensors))
        if dtypes != [entry.dtype for entry in self._entries]:
            self._entries = [replace(entry, dtype=dtype) for entry, dtype in zip(self._entries, dtypes, strict=True)]
            self.close()

    def resize(self, sizes: BucketSizes) -> None:
        """Reduce in buckets of other sizes from the next step on; every rank after the same step. Local."""
        if sizes != self.sizes:
            self.sizes = sizes
            self.close()

    def drop(self) -> None:
        """Forget what was agreed, and the step that has begun: the owner will not use it again. Local."""
        with self._lock:
            self._marked.clear()
        self.close()

    @property
    def total_bytes(self) -> int:
        return sum(math.prod(entry.shape) * entry.dtype.itemsize for entry in self._entries)

    def forget(self) -> None:
        super().forget()
        if self.schedule is not None:
            self.schedule.roll_back()
        self.schedule = self._steady_in = None
        self._early.follow(None)

    # -- what a join needs ----------------------------------------------------------------------

    def mark(self) -> Mark:
        memory = self._settings.memory
        return Mark() if memory is None else memory.mark()

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
        proposal = Proposal(
            names=tuple(entry.name for entry in self._entries),
            shapes=tuple(entry.shape for entry in self._entries),
            dtypes=tuple(dtype_name(entry.dtype) for entry in self._entries),
            strides=tuple(None if tensor.is_sparse else order_in_memory(tensor) for tensor in tensors),
            sparse=tuple(map(_is_sparse, tensors)),
            order=tuple(dict.fromkeys([*self._marked, *range(len(tensors))])),
            sizes=self.sizes,
            settings=(self._settings.describe(), tuple(tuple(group) for group in self._groups)),
            devices=tuple(kind_of(entry.device) for entry in self._entries),
            memory=self.mark(),
            portable=self._settings if self._settings.is_portable else None,
            start=tuple(self.start.values()),
        )
        home = None if self._arrivals is None else self._arrivals.home
        queue, agreed = self._agree_on_queue("plan", proposal, home)
        start, self.start = self.start, {}
        if agreed.apart is not None and self._set_state.group.rank == 0:
            position, index = agreed.apart
            self._warn_of(position, list(start)[index])
        return self._follow(queue, agreed)

    def _warn_of(self, position: int, name: str) -> None:
        ranks = self._set_state.group.ranks
        _log.warning(
            "%s differ before the first step of %r: %r of rank %d is not that of rank %d. Averaged gradients do not "
            "make them equal. Call hvd.broadcast_parameters(model.state_dict(), root_rank=%d) before training.",
            "buffers" if name.startswith("buffer ") else "parameters",
            self.name,
            name,
            ranks[position],
            ranks[0],
            ranks[0],
        )

    def _follow(self, queue: OpQueue, agreed: Proposal) -> Schedule:
        if self._settings.memory is not None:
            self._settings.memory.align(agreed.memory)
        schedule = self.schedule = Schedule(agreed, queue, self._settings)
        self.queue, self.serial = queue, agreed.serial
        self._early.follow(schedule.plan)
        return schedule

    # -- one step -------------------------------------------------------------------------------

    def _note_absent(self, schedule: Schedule, tensors: Sequence[torch.Tensor]) -> None:
        absent: Collection[int] = schedule.absent
        if self._settings.memory is not None:
            # What a compressor had left over of earlier steps has arrived.
            absent = [index for index in absent if tensors[index].is_sparse or not tensors[index].any()]
        self.absent = absent

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
            with self._lock:
                rest = self._early.start_rest()
            if not rest.start:
                self._running = []
            said = 1 + INCOMPLETE * bool(missing)
            operation = schedule.start(rest, tensors, said, missing, in_memory, self._streams, drive=True)
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
        for each in running:
            if each.error is not None:
                self.close()
                raise each.error
        if self._arrivals is not None:
            self._leave_streams(self._arrivals, schedule)
        if schedule.memory is not None:
            schedule.memory.commit()

    def _leave_streams(self, arrivals: GradientStreams, schedule: Schedule) -> None:
        error = arrivals.leave(schedule.device)
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
