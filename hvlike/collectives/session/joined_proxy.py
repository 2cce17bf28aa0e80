"""What takes part in planned operations for a rank that has joined.

JoinedProxy     runs the steps of one plan with neutral contributions, until a step has no active rank
JoinedProxies   those of one process set
"""

from __future__ import annotations

import math
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, MutableMapping, MutableSet, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

import torch

from hvlike.backends.base import Backend
from hvlike.backends.cuda.device_backend import DeviceBackend, on_device
from hvlike.backends.cuda.runtime import Event
from hvlike.backends.op_queue import OpQueue, OpQueues
from hvlike.backends.operation import Operation
from hvlike.collectives.controller.controller import Controller
from hvlike.collectives.controller.member_tree import OPTIONS
from hvlike.collectives.health.option_watch import OptionWatch, ReadOptions
from hvlike.collectives.persistent.schedule import Schedule
from hvlike.collectives.requests.join_protocol import PLANNED_KINDS, neutral_tensors
from hvlike.collectives.requests.message_table import Response
from hvlike.collectives.requests.request import CallSite, Request, RequestSpec
from hvlike.errors import ShutdownError, UsageError
from hvlike.transport.loop.coroutine import Coroutine, in_loop

if TYPE_CHECKING:
    from hvlike.collectives.session.process_set_state import ProcessSetState

CountingJob = Callable[[Backend], Coroutine[int]]  # A step; returns how many ranks were active (Backend.count_active)


class JoinedProxy(ABC):
    def __init__(self, queue: OpQueue, serial: int) -> None:
        self.queue = queue
        self.serial = serial
        self.finished = False
        self.error: BaseException | None = None
        self.steps = 0  # Steps with an active rank: those that this rank has missed

    @abstractmethod
    def begin(self) -> None:
        """Enter the next step; it ends when all ranks have entered it."""

    def _goes_on(self, active: int) -> bool:
        """A step has ended, with so many active ranks; whether there is a next one."""
        self.finished = self.error is not None or not active
        self.steps += not self.finished
        return not self.finished

    def cancel(self, error: BaseException | None = None) -> None:
        """Leave for good: this rank can no longer stand in, or the others have given this plan up."""
        self.error = self.error or error
        if not self.finished:
            self.finished = True
            self.queue.fail(error or ShutdownError("the ranks that go on have given this planned operation up"))


class PlanProxy(JoinedProxy):
    def __init__(self, schedule: Schedule) -> None:
        super().__init__(schedule.queue, schedule.serial)
        self.finished = not schedule.buckets
        self._schedule = schedule
        with schedule.in_stream():
            self._tensors = schedule.zeros()

    def begin(self) -> None:
        schedule = self._schedule
        step = schedule.start(range(len(schedule.buckets)), self._tensors, active=0, missing=range(schedule.entries))
        # The last bucket counts, so the host always has a part in it.
        assert step is not None
        step.then(self._step_ended)

    def _step_ended(self, last: Operation) -> None:
        self.error = self.error or last.error
        if self.finished:
            return
        if not self._goes_on(self._schedule.active):
            return
        with self._schedule.in_stream():
            for tensor in self._tensors.values():
                tensor.zero_()
        self.begin()


class QueueProxy(JoinedProxy):
    """Runs on a planned queue what its owner has for a rank that has joined."""

    def __init__(
        self, queue: OpQueue, serial: int, stand_in: Callable[[], CountingJob], ready: Sequence[Event] | None = None
    ) -> None:
        """stand_in: makes the job of a step. ready: it runs on the backend of the queue's device, and first waits."""
        super().__init__(queue, serial)
        self._ready = ready
        self._stand_in = stand_in

    def begin(self) -> None:
        try:
            job = self._stand_in()
        except Exception as error:
            self.cancel(error)
            return

        work = job if self._ready is None else on_device(self.queue, None, job, self._ready)
        self.queue.run(work).then(self._ended)

    def _ended(self, step: Operation) -> None:
        self.error = self.error or step.error
        if not self.finished and self._goes_on(step.value):
            self.begin()


class PersistentOperation(ABC):
    """What agrees once with the other ranks and then runs step after step on a queue of its own."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.queue: OpQueue | None = None  # The agreed one, None while there is none, as `serial`
        self.serial: int | None = None  # The number of the agreed plan
        self.served = 0  # Steps that have ended since the last agreement: the same on every rank after a step
        self._set_state: ProcessSetState | None = None
        self._release: weakref.finalize[Any, Any] | None = None
        self._step = 0
        self._in_step = False
        self._running: list[Operation] = []  # What this rank has begun of the step under way, in the queue's order
        self._options: OptionWatch | None = None
        self._look_at = math.inf  # After this step the options are looked at

    @property
    def busy(self) -> bool:
        """Whether a step has begun that has not ended. Any thread."""
        return self._in_step or self._is_running

    @property
    def _is_running(self) -> bool:
        # The queue does them in their order.
        return bool(self._running) and not self._running[-1].done()

    @property
    def healthy(self) -> bool:
        return self.queue is not None and self.queue.broken is None

    @abstractmethod
    def check_can_join(self) -> None:
        """Raise UsageError where nothing can stand in while this rank has joined. Local."""

    @abstractmethod
    def has_no_more_data(self) -> None:
        """This thread joins; its stream writes the tensors that `proxy` may use. Local."""

    @abstractmethod
    def proxy(self) -> JoinedProxy:
        """What takes part in the agreed plan while this rank has joined. In the loop."""

    @abstractmethod
    def adopt(self, queue: OpQueue, agreed: Any) -> JoinedProxy:
        """The others have agreed anew while this rank has joined: what takes part in that. In the loop."""

    def watch_options(self, read: WeakMethod[ReadOptions]) -> None:
        """Have the first rank warn where what `read` returns between two steps is not the same on all ranks."""
        assert self._set_state is not None
        send = partial(_send_options, self._set_state.controller, self.name)
        watch = OptionWatch(self.name, self._set_state.group, send, read)
        self._options = self._set_state.proxies.watches[self.name] = watch
        self._look_at = 1

    def _look_at_options(self) -> None:
        if self._options is not None and self.serial is not None:
            self._look_at = self._options.look(self.serial, self._step)

    @in_loop
    def fail(self, error: BaseException) -> None:
        """End a step that can never be completed."""
        if self.queue is not None:
            self.queue.fail(error)

    def close(self) -> None:
        """Forget what was agreed; the next step agrees anew. Local; nothing may be in flight.

        Not while another thread stands in: the other ranks count on the plan, and all forget it at the end.
        """
        if self._set_state is not None and self._set_state.proxies.stands_in_elsewhere:
            return
        if self._release is not None:
            self._release()
        self.forget()

    def forget(self) -> None:
        """Forget what was agreed and count steps anew; what becomes of the queue is up to the caller."""
        if self._release is not None:
            self._release.detach()
        self._release = self.queue = self.serial = None
        self.served = self._step = 0
        self._look_at = math.inf if self._options is None else 1

    def _agree_on_queue(self, kind: str, proposal: Any, home: torch.device | None) -> tuple[OpQueue, Any]:
        """Propose to all ranks; the queue, on the device `home`, and what follows from all. Collective; blocks."""
        assert self._set_state is not None
        queues = self._set_state.queues
        spare = queues.propose()
        options = () if self._options is None else self._options.read()
        spec = RequestSpec(kind, detail=proposal._replace(spare_queue=spare, options=options))
        try:
            controller = self._set_state.controller
            handle = controller.submit(spec, self.name, [], attrgetter("outputs"), wake=False, home=home)
            queue, agreed = handle.result()
        except BaseException:
            queues.give_back(spare)
            raise
        if queue.number != spare:
            queues.give_back(spare)
        if self._options is not None:
            self._options.begin(agreed.serial, agreed.options, options)
        self._release = weakref.finalize(self, queues.give_back, queue.number)
        return queue, agreed

    def _wait_in_step(self, step: int, site: CallSite, detail: str = "") -> None:
        """Wait for the end of what runs in a step; reports and the search for deadlocks know of it."""
        assert self._set_state is not None
        controller, done = self._set_state.controller, self._running[-1].done
        controller.wait_in_order(self.name, step, done, self.fail, place=site, detail=detail)


def _send_options(controller: Controller, name: str, rank: int, message: tuple[Any, ...]) -> None:
    controller.send_soon(rank, OPTIONS, (name, *message), wake=True)


class JoinedProxies:
    def __init__(self, queues: OpQueues, controller: Controller) -> None:
        self._planned: MutableSet[PersistentOperation] = weakref.WeakSet()
        self._queues = queues
        self._controller = controller
        self._by_name: dict[str, JoinedProxy] = {}
        self._used: dict[int, OpQueue] = {}  # By proxies of this join, those that were replaced too
        self._missed = 0
        self._thread: int | None = None  # That waits for the others to join too; None while this rank has inputs
        self.watches: MutableMapping[str, OptionWatch] = weakref.WeakValueDictionary()  # By the names of plans
        controller.stand_in = self._stand_in
        controller.listen(OPTIONS, self._hear_options)

    @property
    def planned(self) -> list[PersistentOperation]:
        """Those of this rank that live, in the order of their names, which is the same on all ranks."""
        return sorted(self._planned, key=attrgetter("name"))

    def add(self, operation: PersistentOperation) -> None:
        self._planned.add(operation)

    def set_thread(self, thread: int | None) -> None:
        """This thread stands in for this rank from now on; None: nobody does."""
        self._thread = thread

    @property
    def stands_in(self) -> bool:
        return self._thread is not None

    @property
    def stands_in_elsewhere(self) -> bool:
        """Whether that is another thread than the one that asks."""
        return self._thread is not None and self._thread != threading.get_ident()

    def check_present(self, what: str) -> None:
        """Raise UsageError where another thread stands in for this rank: both would take part in the same operation."""
        if self.stands_in_elsewhere:
            raise UsageError(
                f"{what}: another thread of this rank has called hvd.join(), or has left the loop in its Join context, "
                "while other ranks go on. It takes part with zeros in all that they do on this process set, so this "
                "thread cannot take part as well. Use no collective of the set in other threads while one joins."
            )

    def check_idle(self, call: str) -> None:
        """Raise UsageError where a step is half done, in which this rank cannot stand in too."""
        for each in self.planned:
            # Another thread says that it is in a step before it looks whether this one stands in.
            if each.busy:
                raise UsageError(
                    f"{call} between backward and step: {each.name!r} is being reduced. Call optimizer.step() or "
                    "optimizer.synchronize() first; a DistributedDataParallel whose backward pass has raised completes "
                    "it in its next forward. If another thread trains: let it end, a thread that joins speaks for the "
                    "whole rank."
                )

    def spare_queues(self) -> frozenset[int]:
        """The queues that are not used now, not even for the plan of an owner who is gone."""
        used = {each.queue.number for each in list(self._by_name.values())}
        return frozenset(self._queues.spare_numbers()) - used

    def names(self) -> frozenset[str]:
        """Return the names of all that could be planned anew. Raises: UsageError where a rank cannot join. Local."""
        for operation in self.planned:
            operation.check_can_join()
        return frozenset(operation.name for operation in self.planned)

    @property
    def missed(self) -> int:
        """How many steps with an active rank this rank has stood in for, of the plan that has had the most."""
        return max(self._missed, max((each.steps for each in list(self._by_name.values())), default=0))

    def begin(self, planned: Iterable[PersistentOperation]) -> None:
        self._missed = 0
        for each in planned:
            if each.serial is not None:
                self._add(each.name, each.proxy())

    def settled(self, plans: frozenset[int]) -> bool:
        """True when all proxies of these plans have seen the step without an active rank."""
        return all(each.finished for each in list(self._by_name.values()) if each.serial in plans)

    @in_loop
    def end(self, plans: frozenset[int], spare_queues: frozenset[int]) -> list[DeviceBackend]:
        """All have joined: go on alike. Plans are forgotten, their queues spare, on every rank.

        Returns those for which the stream of the thread that has joined has to wait: proxies have used its tensors.
        """
        missed = self.missed
        proxies, self._by_name = self._by_name, {}
        used, self._used = self._used, {}
        healthy_queues = [queue for queue in used.values() if queue.broken is None]
        self._missed = missed
        healthy = set(spare_queues)
        for proxy in proxies.values():
            if proxy.serial in plans and proxy.error is None:
                healthy.add(proxy.queue.number)
            else:
                proxy.cancel()
        for each in self.planned:
            each.forget()
        self._queues.set_spare(healthy)
        self._controller.positions.entered.clear()
        return [queue.device for queue in healthy_queues if queue.device is not None]

    def steps(self) -> dict[str, int]:
        """How many steps of each plan this rank has entered and can complete, whatever its program does now."""
        lost = {each.name for each in self.planned if not each.healthy}
        return {name: steps for name, steps in self._controller.positions.copy().items() if name not in lost}

    def give_up(self) -> None:
        for proxy in list(self._by_name.values()):
            proxy.cancel()
        self._by_name, self._used = {}, {}
        for each in self.planned:
            each.forget()

    @in_loop
    def reset(self, spare_queues: Iterable[int]) -> None:
        """Steps may be half done anywhere: forget all plans, on every rank."""
        for each in self.planned:
            each.fail(ShutdownError("a Join context was left in the middle of this planned operation"))
        self.give_up()
        self._queues.set_spare(spare_queues)
        self._controller.positions.entered.clear()

    def error(self) -> BaseException | None:
        return next((each.error for each in list(self._by_name.values()) if each.error is not None), None)

    def _add(self, name: str, proxy: JoinedProxy) -> None:
        before = self._by_name.get(name)
        if before is not None:
            self._missed = max(self._missed, before.steps)
            before.cancel()
        self._by_name[name] = proxy
        self._used[proxy.queue.number] = proxy.queue
        if not proxy.finished:
            proxy.begin()

    def _hear_options(self, rank: int, message: tuple[Any, ...]) -> None:
        watch = self.watches.get(message[0])
        if watch is not None:
            watch.hear(rank, *message[1:])

    def _stand_in(self, response: Response) -> Request | None:
        """What this rank, which has joined, does for an operation of the others; None: nothing."""
        kind, name = response.key
        if kind == "allreduce":
            return Request(name, response.spec, neutral_tensors(response.spec), lambda request: None)
        return Request(name, response.spec, [], self._adopt) if kind in PLANNED_KINDS else None

    def _adopt(self, request: Request) -> None:
        """The others have made a plan: take part in it."""
        queue, agreed = request.outputs
        own = next((each for each in self.planned if each.name == request.name), None)
        proxy = own.adopt(queue, agreed) if own else PlanProxy(Schedule(agreed, queue, agreed.portable))
        self._add(request.name, proxy)
