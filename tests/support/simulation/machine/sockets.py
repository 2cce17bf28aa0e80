"""What ranks of a simulated job sleep on across nodes: hvlike.transport.loop.socket_events.SocketEvents."""

from __future__ import annotations

from functools import partial

from support.simulation.machine.scheduler import Scheduler
from support.simulation.machine.simulated_mpi import SimulatedMpi
from support.simulation.machine.simulated_network import Endpoint


class Sockets:
    """The sockets of all ranks of a job."""

    def __init__(self, scheduler: Scheduler, mpi: SimulatedMpi) -> None:
        self._scheduler, self._mpi = scheduler, mpi
        self._by_token: dict[int, SocketEvents] = {}

    def open(self) -> SocketEvents:
        """Those of the rank that calls."""
        rank, network = self._scheduler.rank, self._mpi
        made = SocketEvents(self, self._scheduler, network.endpoints[rank], tell=network.sockets_tell)
        self._by_token[made.token] = made
        return made

    def find(self, token: int) -> SocketEvents | None:
        """Those with this token."""
        return self._by_token.get(token)


class SocketEvents:
    """See the class of this name in hvlike; the sockets of one rank."""

    def __init__(self, sockets: Sockets, scheduler: Scheduler, endpoint: Endpoint, *, tell: bool) -> None:
        """tell: whether MPI uses sockets at all."""
        self._sockets, self._scheduler, self.endpoint = sockets, scheduler, endpoint
        self._tell = tell
        self.rung = False
        self.carry = self.paced = False
        self.token = scheduler.rank + 1

    def scan(self) -> None:
        """Forget what they have told so far."""
        self.endpoint.take_events()

    def check_carry(self) -> None:
        """Whether they have told of messages since `scan`."""
        self.carry = self.endpoint.take_events() and self._tell

    def sleep(self, seconds: float) -> bool:
        """Sleep until one of them tells of something, a rank of this node rings, or so long."""
        scheduler, endpoint = self._scheduler, self.endpoint
        limit = scheduler.now + seconds
        while scheduler.now < limit:
            until = min(limit, endpoint.next_told())
            scheduler.sleep_for(partial(self._wakes, until), until, "sleeps on sockets", endpoint)
            if self._is_told():
                break
        endpoint.take_events()
        self.rung = False
        return True

    def _wakes(self, until: float) -> bool:
        return self._is_told() or self.endpoint.next_told() < until

    def _is_told(self) -> bool:
        return self.rung or self.endpoint.next_told() <= self._scheduler.now

    def send(self, token: int) -> None:
        """Wake the rank that has this token."""
        other = self._sockets.find(token)
        if other is not None:
            other.rung = True
            self._scheduler.change()
            self._scheduler.touch(other.endpoint)

    def close(self) -> None:
        """Nothing is to be done."""
