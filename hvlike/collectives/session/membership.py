"""Which ranks of the job are still there, and what that does to this one.

    COMPLETE ----> REDUCED    ranks have left in order, or are lost: what needs them fails, the rest goes on
        |             |
        +------+------+       under elastic.run the same; anywhere, if another rank has revoked the communicators
               v
           GIVEN UP           every wait ends with an error, those to come too: this rank is to start again

Who is lost is found out in three ways: the processes of this node are watched; under fault tolerance MPI is asked
instead; and between nodes there is the heartbeat. Without fault tolerance the launcher ends the job where a rank is
lost, and what is done here matters only until then.
"""

from __future__ import annotations

from functools import partial

from hvlike.collectives.health.departures import Departures, Errors
from hvlike.collectives.health.shutdown_barrier import ShutdownBarrier
from hvlike.collectives.session.process_set_state import Registry, stall_limits
from hvlike.config import Config
from hvlike.errors import HorovodInternalError, PeerLeftError, RestartError
from hvlike.transport.fabric import Fabric
from hvlike.transport.failure.guard import Guard
from hvlike.transport.failure.heartbeat import Heartbeat, heartbeat_limit
from hvlike.transport.failure.watchdog import Liveness
from hvlike.transport.loop.coroutine import in_loop


class Membership:
    def __init__(self, fabric: Fabric, guard: Guard, registry: Registry, departures: Departures, knobs: Config) -> None:
        """departures: tells the rest of this process."""
        self.restarts = False  # Whether this rank gives up where another one is gone: elastic.run starts again
        self.lost: dict[int, HorovodInternalError] = {}  # Under fault tolerance: ranks that MPI goes on without
        self.given_up = False
        self._fabric = fabric
        self._world = fabric.world
        self._registry = registry
        self._departures = departures
        self._processes = {rank: bell.process for rank, bell in fabric.bells.items()}
        # Under fault tolerance MPI is told who is lost, and asked.
        self._liveness = Liveness({} if self._world.job is not None else self._processes)
        self.barrier = ShutdownBarrier(fabric, partial(self._go_on_without, in_order=True), stall_limits(knobs))
        fabric.ticks.append(self._watch)
        limit = heartbeat_limit(knobs.heartbeat_seconds, nodes=len(self._world.nodes))
        self._heartbeat = Heartbeat(fabric, guard, limit, self._lose) if limit else None
        if self._heartbeat is not None:
            fabric.ticks.append(self._heartbeat.tick)

    @property
    def is_broken(self) -> bool:
        """Whether the ranks will not all come to the end of this job: nobody is to wait for that. Any thread."""
        return bool(self.lost) or self.given_up

    def conclude(self) -> None:
        """This rank leaves without the others, and will hear nothing more of them."""
        if self._heartbeat is not None:
            self._heartbeat.conclude()

    @in_loop
    def _watch(self) -> None:
        self._registry.watch()
        lost = sorted({*self._liveness.lost(), *self._world.lost()} - set(self.lost))
        if lost:
            self._lose({rank: PeerLeftError(self._describe_lost(rank)) for rank in lost})
        elif not self.given_up and self._world.is_revoked():
            self._give_up(RestartError("Another rank has met an error, and starts again without lost ranks."))

    def _describe_lost(self, rank: int) -> str:
        process = self._processes.get(rank)
        where = f"it was process {process} on {self._world.host}" if process else "it was on another host"
        return f"The process of rank {rank} has vanished without a word; {where}."

    @in_loop
    def _lose(self, errors: Errors) -> None:
        """The processes of some ranks are lost."""
        for rank in errors:
            self._fabric.channel.lose(rank)
        if self._world.job is not None:
            self.lost |= errors
            self.barrier.lose()
        else:
            self._fabric.loop.start(self.barrier.fail(next(iter(errors.values()))), wake=False)
        self._go_on_without(errors)

    @in_loop
    def _go_on_without(self, errors: Errors, *, in_order: bool = False) -> None:
        """Some ranks have left, or are lost."""
        self._departures.tell(errors, in_order=in_order)
        if self.restarts:
            self._give_up(next(iter(errors.values())))
        else:
            self._registry.lose(errors)

    @in_loop
    def _give_up(self, error: HorovodInternalError) -> None:
        """Get every thread out of its wait, so that the program can start again."""
        self.given_up = True
        others = set(range(self._world.size)).difference([self._world.rank], self.lost)
        self._departures.tell(dict.fromkeys(others, error))
        self._registry.fail(error)
        self._fabric.loop.fail(error)
