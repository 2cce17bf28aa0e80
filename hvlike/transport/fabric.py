"""The fabric: everything through which one process talks to the others: world, doorbells, loop, messages, clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvlike.observe.counters import Counters
from hvlike.observe.recorder import Recorder
from hvlike.system.mapped_memory import Segment
from hvlike.system.system import system
from hvlike.transport.failure import watchdog
from hvlike.transport.host import topology
from hvlike.transport.loop.coroutine import Coroutine, Wait
from hvlike.transport.loop.loop import Loop
from hvlike.transport.loop.socket_events import SocketEvents
from hvlike.transport.loop.spin import TICK_SECONDS, TOLERANT_TICK_SECONDS, SpinPolicy
from hvlike.transport.memory import segment
from hvlike.transport.memory.allocations import Allocations
from hvlike.transport.memory.doorbell import BELL_BYTES, Doorbell, Fence
from hvlike.transport.messages.channel import Channel, Mailbox
from hvlike.transport.messages.direct_copy import SLOT_WORDS, DirectCopies
from hvlike.transport.messages.traffic import CountedComm, Topic, Traffic
from hvlike.transport.world import Group, World


class PlanEpoch:
    """One number that grows whenever something changes that a plan has decided: the guard of all plans."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def advance(self) -> None:
        """Let every plan look closely before its next step. Any thread."""
        self.value += 1


class Fabric:
    """The transport of one rank, from init to shutdown."""

    def __init__(self, world: World, *, peer_memory: bool = True) -> None:
        """Collective and blocking. peer_memory: let the ranks of a node copy between their memories, where that is
        permitted. Raises: LaunchError on every rank of a node that has no memory to share.
        """
        self.world = world
        self.fence = Fence()
        self.traffic = Traffic()
        self.counters = Counters()
        self.allocations = Allocations()
        size = world.local_size
        counts_at, slots_at = size * BELL_BYTES, size * BELL_BYTES + 8 * size * size
        signs_at = slots_at + 8 * SLOT_WORDS * size
        board = segment.share(world.node_comm, signs_at + 8 * len(world.nodes) * size)
        local = next(node for node in world.nodes if world.rank in node)
        self.local_ranks = local
        sockets: Callable[[], SocketEvents] = system.socket_events or SocketEvents
        self.sockets = sockets() if size < world.size else None
        wakes = {} if self.sockets is None else {"send": self.sockets.send}
        self.bells = {rank: Doorbell(board, index, self.fence, **wakes) for index, rank in enumerate(local)}
        self.bell = self.bells[world.rank]
        self.bell.initialise(system.process(), 0 if self.sockets is None else self.sockets.token)
        positions = {rank: index for index, rank in enumerate(local)}
        direct = DirectCopies(
            system.words(board, slots_at, SLOT_WORDS * size), positions, self.bells, world.rank, self.fence
        )
        # For each rank of the node a word for each node: what it has heard of that one.
        self.signs_of_life = system.words(board, signs_at, len(world.nodes) * size)
        affinities = world.node_comm.allgather(system.cores())
        # Also a barrier: the slots of direct copies are ready on every rank.
        places = world.comm.allgather((topology.machine_id() or world.nodes.index(local), system.cores()))
        reaches = peer_memory and direct.reaches(local[(world.local_rank + 1) % size])
        self.reaches_peers = direct.enabled = all(world.node_comm.allgather(reaches))
        self.cores = topology.cores_on_machine(places, world.rank)
        self.node_is_crowded = topology.any_crowded(affinities)
        self.recorder = Recorder(world.rank, world.size, world.host, _clock_offset(world))
        self.plan_epoch = PlanEpoch()
        self.recorder.on_switch = self.plan_epoch.advance
        self.ticks: list[Callable[[], None]] = [self.recorder.flush]
        self.job_is_crowded = topology.any_machine_crowded(places)
        crowded = topology.is_crowded(self.cores)
        tick = TICK_SECONDS if world.job is None else TOLERANT_TICK_SECONDS
        self.spin = SpinPolicy(crowded=crowded, tick_seconds=tick)
        self.loop = Loop(self.bell, spin=self.spin, sockets=self.sockets, tick=self._tick)
        counters = system.words(board, counts_at, size * size)
        self.channel = Channel(world.mpi, world.comm, self.loop, self.bells, counters, self.traffic, direct)
        self.mailbox = Mailbox(self.channel, Topic.MAILBOX)

    def share(self, group: Group, key: Any, nbytes: int) -> Coroutine[Segment | None]:
        """One zeroed segment for the members of `group` on this node, which all run this; None: they cannot."""
        leader, *others = (group.ranks[position] for position in group.node)
        if not others:
            return system.private(nbytes)
        leads = self.world.rank == leader
        mailbox = self.mailbox

        def tell(value: Any) -> Coroutine[Any]:
            if not leads:
                value = yield from mailbox.receive(leader, (key, "told"))
            for rank in others if leads else ():
                mailbox.send(rank, (key, "told"), value)
            return value

        def collect(ok: bool) -> Coroutine[bool]:
            if not leads:
                mailbox.send(leader, (key, "ok"), ok)
            for rank in others if leads else ():
                ok = (yield from mailbox.receive(rank, (key, "ok"))) and ok
            return ok

        return (yield from segment.share_steps(nbytes, leads=leads, tell=tell, collect=collect))

    def duplicate(self, comm: Any) -> Coroutine[Any]:
        """A duplicate of a communicator, without blocking, that counts what is sent through it. Collective."""
        copy, request = comm.Idup()
        while not request.Test():
            yield Wait.POLL
        copy.Set_errhandler(self.world.mpi.ERRORS_RETURN)
        return CountedComm(copy, self.traffic)

    def look_at(self, rank: int) -> str:
        """What one of the others of its node, if this is that one, sees of a rank that does not answer; else empty."""
        if rank not in self.bells:
            return ""
        places = self.local_ranks
        if places[(places.index(rank) + 1) % len(places)] != self.world.rank:
            return ""
        return watchdog.request_stacks(self.bells[rank].process)

    def _tick(self) -> None:
        for each in self.ticks:
            each()

    def close(self) -> None:
        self.loop.close()
        if self.sockets is not None:
            self.sockets.close()


def _clock_offset(world: World) -> int:
    """What to add to system.monotonic_ns() for the nanoseconds since the job began, the same on all ranks of a node.
    Collective and blocking; nodes are as far apart as their wall clocks.
    """
    offset: int = world.node_comm.bcast(system.time_ns() - system.monotonic_ns(), root=0)
    began: int = world.comm.bcast(system.time_ns(), root=0)
    return offset - began
