"""The state of process sets on this rank.

ProcessSetState    one registered set: group, op queues, controller, executor
Registry           all sets of the job, numbered; ends queues whose GPU has failed, on all ranks
ControllerRouter   brings messages to the controller of their set
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from hvlike.backends.inline_allreduce import open_inline_allreduce
from hvlike.backends.op_queue import OpQueue, OpQueues, open_queue
from hvlike.collectives.controller.controller import Controller
from hvlike.collectives.controller.execution import Executor
from hvlike.collectives.controller.inline_agreement import BoardAgreement, MessageAgreement
from hvlike.collectives.controller.inline_allreduce import InlineAllreduce
from hvlike.collectives.controller.inline_calls import InlineCalls, inline_allreduces
from hvlike.collectives.controller.inline_messages import MOST_MEMBERS, InlineMessages
from hvlike.collectives.controller.owner_names import OwnerNames
from hvlike.collectives.controller.trace import Trace
from hvlike.collectives.health.departures import Departures, Errors
from hvlike.collectives.health.stall_inspector import StallLimits
from hvlike.collectives.requests.message_table import name_ranks
from hvlike.collectives.requests.process_set import FIRST_PRIVATE_SET, ProcessSet, global_process_set
from hvlike.collectives.session.join_contexts import JoinContexts
from hvlike.collectives.session.joined_proxy import JoinedProxies
from hvlike.config import Config
from hvlike.errors import HorovodInternalError, ShutdownError, UsageError, WrongTypeError
from hvlike.system.system import system
from hvlike.transport.fabric import Fabric
from hvlike.transport.loop.coroutine import Coroutine, in_loop, pause
from hvlike.transport.messages.traffic import Topic
from hvlike.transport.world import Group, World

_LEFT_BEHIND_SECONDS = 1.0


class ProcessSetState:
    def __init__(
        self,
        fabric: Fabric,
        group: Group,
        first: OpQueue,
        router: ControllerRouter,
        knobs: Config,
        end: Callable[[HorovodInternalError], None],
    ) -> None:
        """first: the queue of negotiated requests; end: ends everything on this rank with an error."""
        self.group = group
        self.queues = OpQueues(fabric, first)
        trace = Trace(fabric.recorder, group)
        self.inline: InlineCalls[Any] | None = None  # Once the set has reduced a few tensors, where it can have one
        self._closing: Callable[[], None] = lambda: None
        self._fabric = fabric
        opening = None
        apart = len(group.nodes) == group.size <= MOST_MEMBERS
        if group.size > 1 and (apart or len(group.nodes) == 1):
            opening = self._open_messages if apart else self._open_board
        self.executor = Executor(self.queues, trace, knobs, opening)
        self._router = router
        self.controller = Controller(
            fabric,
            group,
            self.executor.run,
            end,
            stall_limits(knobs),
            knobs.cache_capacity,
            knobs.cycle_time / 1000,
            trace,
        )
        self.agreement: BoardAgreement | MessageAgreement | None = None
        if opening is not None:
            # What others say of it comes before this rank has opened the board, perhaps.
            peers = [rank for rank in group.ranks if rank != fabric.world.rank]
            kind = MessageAgreement if apart else BoardAgreement
            self.agreement = kind(self.controller.tensor_queue, peers, self.controller.send_soon)
            self.controller.agree_by(self.agreement)
        self.owner_names = OwnerNames()
        self.proxies = JoinedProxies(self.queues, self.controller)
        self.plan_epoch = fabric.plan_epoch  # The guard of plans
        self.rounds = JoinContexts(self.proxies, self.controller, fabric.plan_epoch)
        router.connect(group.number, self.controller)

    def _open_board(self) -> Coroutine[None]:
        queue = yield from self.queues.take(-1)
        inline = yield from open_inline_allreduce(self._fabric, self.group, queue)
        if inline is not None:
            agreement = self.agreement
            assert isinstance(agreement, BoardAgreement)
            self._serve(InlineAllreduce(self.controller, agreement, inline, self._fabric.recorder, self.group.size))

    def _open_messages(self) -> Coroutine[None]:
        queue = yield from self.queues.take(-1)
        comm = yield from self._fabric.duplicate(self.group.comm)
        agreement = self.agreement
        assert isinstance(agreement, MessageAgreement)
        inline = InlineMessages(self.controller, agreement, queue, comm, self._fabric, self.group)
        self._closing = inline.close
        self._serve(inline)

    def _serve(self, inline: InlineCalls[Any]) -> None:
        self.inline = inline_allreduces.by_set[self.group.number] = inline

    @in_loop
    def lose(self, errors: Errors) -> None:
        """Some ranks have left, or are lost: what needs them fails."""
        gone = [errors[rank] for rank in errors if rank in self.group.ranks]
        if gone:
            for queue in self.queues.all():
                queue.peer_left = gone[0]
            self.controller.lose(errors)
            self._fabric.loop.start(self._abandon(errors), wake=False)

    def _abandon(self, errors: Errors) -> Coroutine[None]:
        """Fail what runs, and what comes, in a set that a rank has left; first take what it has still sent."""
        yield from pause(_LEFT_BEHIND_SECONDS)
        for queue in self.queues.all():
            queue.fail(queue.peer_left or next(iter(errors.values())))
        self.controller.lose_parent(errors)

    @in_loop
    def fail(self, error: HorovodInternalError) -> None:
        """End everything in flight in this set with `error`."""
        inline_allreduces.by_set.pop(self.group.number, None)
        self.controller.close(error)
        for queue in self.queues.all():
            queue.fail(error)

    def close(self) -> None:
        """Give back communicators. Collective over the group, after everything has ended."""
        self._router.disconnect(self.group.number)
        for queue in self.queues.all():
            queue.close()
        self._closing()
        self.executor.site.close()
        self.group.disconnect()


def stall_limits(knobs: Config) -> StallLimits:
    if knobs.stall_check_disable:
        return StallLimits(None, 0.0)
    return StallLimits(knobs.stall_check_seconds, knobs.stall_shutdown_seconds)


class Registry:
    def __init__(self, fabric: Fabric, knobs: Config, departures: Departures) -> None:
        self.set_states: dict[int, ProcessSetState] = {}
        self.sets: dict[int, ProcessSet] = {}
        self._departures = departures
        self._fabric = fabric
        self._knobs = knobs
        self.made: Counter[str] = Counter()  # How often a group of each name was made: members count alike
        self._router = ControllerRouter(fabric)
        self._next = 0
        fabric.channel.listen(Topic.DEVICE, lambda rank, message, tensors: self._hear_device(rank, *message))

    def find(self, process_set: ProcessSet | None, what: str) -> ProcessSetState:
        """The set that operation `what` runs in. Raises: UsageError for one not registered, or without this rank."""
        if process_set is None or process_set is global_process_set:
            return self.set_states[0]
        if not isinstance(process_set, ProcessSet):
            raise WrongTypeError(f"{what}: expected a ProcessSet, got {type(process_set).__name__}.")
        if not self.is_registered(process_set):
            raise UsageError(
                f"{what}: Process set provided does not exist, or has not been registered: {process_set}. Pass it to "
                "init(process_sets=[...]) or add_process_set() on every rank."
            )
        set_state = self.set_states.get(process_set.process_set_id or 0)
        if set_state is None:
            raise UsageError(
                f"{what}: Rank {self._fabric.world.rank} is not a member of the provided process set, which has "
                f"{name_ranks(process_set.ranks or [])}."
            )
        return set_state

    def is_registered(self, process_set: ProcessSet) -> bool:
        number = process_set.process_set_id
        return number is not None and self.sets.get(number) is process_set

    def enroll(self, process_set: ProcessSet) -> Coroutine[None]:
        """Register a set. All ranks of the job, in the same order."""
        number = self._next
        self._next += 1
        yield from self._enroll(number, process_set)

    def enroll_members(self, number: int, ranks: Sequence[int]) -> Coroutine[ProcessSetState]:
        """Register a set that its members alone know. All of them, at the same time.

        number: from FIRST_PRIVATE_SET on; no other set has it. ranks: in the order of the set.
        """
        process_set = ProcessSet(ranks)
        process_set.ranks = list(ranks)
        yield from self._enroll(number, process_set)
        return self.set_states[number]

    def shared_sets(self) -> list[ProcessSet]:
        """The sets that all ranks of the job know."""
        return [each for number, each in self.sets.items() if number < FIRST_PRIVATE_SET]

    def _enroll(self, number: int, process_set: ProcessSet) -> Coroutine[None]:
        ranks = process_set.ranks or []
        world = self._fabric.world
        is_shared = number < FIRST_PRIVATE_SET
        # On several nodes this makes communicators and blocks until all ranks are here: they are on the way.
        if world.rank in ranks:
            group = Group(world, number, ranks)
            group.connect(by_all=is_shared)
            queue = yield from open_queue(self._fabric, group, 0)
            self.set_states[number] = ProcessSetState(self._fabric, group, queue, self._router, self._knobs, self.fail)
            # One that was through with this earlier may have left since.
            self.set_states[number].lose(self._departures.errors)
        elif is_shared:
            Group.stand_by(world, ranks)
        self.sets[number] = process_set
        process_set.registered(number, ranks, world.rank)

    def dismiss(self, process_set: ProcessSet) -> Coroutine[None]:
        """Forget a set. All ranks that know it."""
        yield from ()
        number = process_set.process_set_id or 0
        set_state = self.set_states.pop(number, None)
        if set_state is not None:
            set_state.fail(ShutdownError(f"the process set with {name_ranks(process_set.ranks or [])} was removed."))
            set_state.close()
        del self.sets[number]
        process_set.removed()

    @in_loop
    def lose(self, errors: Errors) -> None:
        """Some ranks have left, or are lost: what needs them fails."""
        for set_state in self.set_states.values():
            set_state.lose(errors)

    @in_loop
    def fail(self, error: HorovodInternalError) -> None:
        """End everything in flight with `error`."""
        for set_state in self.set_states.values():
            set_state.fail(error)

    def close(self) -> None:
        for number in sorted(self.set_states):
            self.set_states[number].close()
        self.forget()

    def forget(self) -> None:
        """Let go of all sets without the other ranks."""
        for process_set in self.sets.values():
            process_set.removed()

    @in_loop
    def watch(self) -> None:
        """Look for stalls, and for devices that have failed; a few times a second."""
        for set_state in self.set_states.values():
            set_state.controller.watch()
        now = system.monotonic()
        for number, set_state in self.set_states.items():
            for queue in set_state.queues.all():
                error = queue.watch(now)
                if error is None:
                    continue
                for rank in set_state.group.ranks:
                    if rank != self._fabric.world.rank:
                        self._fabric.channel.send(rank, Topic.DEVICE, (number, queue.number, error), kind="device")

    @in_loop
    def _hear_device(self, rank: int, number: int, queue: int, error: HorovodInternalError) -> None:
        set_state = self.set_states.get(number)
        queues = () if set_state is None else set_state.queues.all()
        if queue < len(queues) and queues[queue].broken is None:
            queues[queue].fail(type(error)(f"on rank {rank}: {error}"))


class ControllerRouter:
    def __init__(self, fabric: Fabric) -> None:
        self.controllers: dict[int, Controller] = {}
        self._early: dict[int, list[tuple[int, str, Any]]] = {}
        self._ended: set[int] = set()
        fabric.channel.listen(Topic.CONTROLLER, self._deliver)

    @in_loop
    def connect(self, number: int, controller: Controller) -> None:
        """Deliver to `controller` from now on, what came early first."""
        self.controllers[number] = controller
        for rank, what, value in self._early.pop(number, []):
            controller.hear(rank, what, value)

    def disconnect(self, number: int) -> None:
        """The set was removed, and no other one gets its number: what still comes for it is dropped."""
        self.controllers.pop(number, None)
        self._ended.add(number)

    @in_loop
    def _deliver(self, rank: int, message: tuple[int, str, Any], tensors: list[Any]) -> None:
        number, what, value = message
        controller = self.controllers.get(number)
        if controller is not None:
            controller.hear(rank, what, value)
        elif number not in self._ended:
            # A peer can be through with registering the set before this rank is.
            self._early.setdefault(number, []).append((rank, what, value))


def what_is_wrong(ranks: Sequence[int], known: Sequence[Sequence[int]], size: int) -> str | None:
    """Why a set of these ranks, in rising order, cannot be registered beside the known ones; None if it can."""
    if list(ranks) in [list(each) for each in known]:
        return f"Attempted to add a duplicate process set: there is one of ranks {list(ranks)}."
    if ranks[-1] >= size:
        return f"The process set {list(ranks)} names rank {ranks[-1]}, but the job has ranks 0 to {size - 1}."
    return None


def ranks_of(comm: Any, world: World) -> list[int]:
    """The ranks of a communicator in our numbering. Local. Raises: UsageError for members outside the world."""
    members, everybody = comm.Get_group(), world.comm.Get_group()
    try:
        ranks = world.mpi.Group.Translate_ranks(members, list(range(members.Get_size())), everybody)
    finally:
        members.Free()
        everybody.Free()
    if world.mpi.UNDEFINED in list(ranks):
        raise UsageError("ProcessSet: the communicator has members outside the ranks that hvlike was started with.")
    return sorted(ranks)
