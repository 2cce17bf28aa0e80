"""Fault tolerance of a simulated MPI: who knows of which loss, what then fails, and how survivors go on.

    lost      each survivor learns of it after a time of its own      calls that need the lost one fail from then on
    Revoke    each member learns of it after a time of its own        all calls on the communicator fail from then on
    Shrink    goes on once each member has called it, or its loss     a communicator of those that have called
    Iagree    is known to all that have                               the AND of their answers, the same on all

A collective that has begun before a loss may end on some members and fail on others. Some things are as Open MPI 5 has
them: Get_status does not tell of a failure (the request just never ends), and may say that a collective which a loss
has cut short has ended well, without its data. A request that has failed in Test or Wait is freed, and Open MPI ends
the process when what was sent by it arrives later: that counts as a wrong use.

Source: MPI Forum, User Level Failure Mitigation, chapter "Process Fault Tolerance"; docs.open-mpi.org.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from support.simulation.machine.simulated_network import ANY_SOURCE, NEVER, Context, Network
from support.simulation.machine.simulated_requests import (
    CollectiveRequest,
    MpiError,
    ReceiveRequest,
    Request,
    SendRequest,
)

if TYPE_CHECKING:
    from support.simulation.machine.simulated_comm import Intracomm

ERR_PROC_FAILED, ERR_PROC_FAILED_PENDING, ERR_REVOKED = 75, 76, 77

TCP_SECONDS = 100.0  # In truth some 900


class Failures:
    """What each rank knows of losses and revoked communicators."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._noticed: dict[int, dict[int, float]] = {rank: {} for rank in range(network.size)}
        self._revoked: dict[int, dict[int, float]] = {}  # By communicator: when each rank knows
        self._acknowledged: dict[tuple[int, int], frozenset[int]] = {}
        self._moments: list[float] = []

    # -- losses ---------------------------------------------------------------------------------------

    def lose(self, lost: int) -> None:
        """A rank is lost: the others will know."""
        network = self._network
        if lost in self._noticed[lost]:
            return
        self._noticed[lost][lost] = network.scheduler.now
        for rank in range(network.size):
            if rank != lost and not network.is_cut(rank, lost):
                longest = network.scheduler.random.choice((0.005, 0.09, 0.09, 1.5))
                self.notice(rank, lost, network.scheduler.now + network.scheduler.random.uniform(0.001, longest))

    def part(self, cut: Iterable[int]) -> None:
        """These ranks cannot be reached any more, nor reach others: in the end the connections break."""
        network, cut = self._network, frozenset(cut)
        for rank in range(network.size):
            for other in range(network.size):
                if (rank in cut) != (other in cut):
                    self.notice(rank, other, network.scheduler.now + TCP_SECONDS)

    def notice(self, rank: int, lost: int, when: float) -> None:
        """A rank knows of a loss from then on."""
        known = self._noticed[rank]
        known[lost] = min(when, known.get(lost, NEVER))
        self._moments.append(when)
        self._network.touch_all()

    def known(self, rank: int, among: Iterable[int]) -> list[int]:
        """Who of some ranks is lost, as this rank knows."""
        known, now = self._noticed[rank], self._network.scheduler.now
        return [each for each in among if known.get(each, NEVER) <= now]

    def next_moment(self) -> float:
        """When somebody will know something new."""
        now = self._network.scheduler.now
        self._moments = [each for each in self._moments if each > now]
        return min(self._moments, default=math.inf)

    def acknowledge(self, rank: int, context: Context) -> None:
        self._acknowledged[rank, context.number] = frozenset(self.known(rank, context.ranks))

    def unacknowledged(self, rank: int, context: Context) -> list[int]:
        known = self._acknowledged.get((rank, context.number), frozenset())
        return [each for each in self.known(rank, context.ranks) if each not in known]

    # -- revoked communicators ------------------------------------------------------------------------

    def revoke(self, rank: int, context: Context) -> None:
        scheduler = self._network.scheduler
        revoked = self._revoked.setdefault(context.number, {})
        for each in context.ranks:
            if self._network.is_cut(rank, each):
                continue
            when = scheduler.now if each == rank else scheduler.now + self._network.delay(rank, each)
            revoked[each] = min(when, revoked.get(each, NEVER))
            self._moments.append(when)
        self._network.touch_all()

    def is_revoked(self, rank: int, context: Context) -> bool:
        return self._revoked.get(context.number, {}).get(rank, NEVER) <= self._network.scheduler.now

    # -- what fails -----------------------------------------------------------------------------------

    def check(self, rank: int, context: Context, peer: int | None = None) -> None:
        """A call begins: raise where it must fail. peer: by position, or any."""
        if self.is_revoked(rank, context):
            raise MpiError(ERR_REVOKED, "MPI_ERR_REVOKED: the communicator was revoked")
        if peer == ANY_SOURCE and self.unacknowledged(rank, context):
            raise MpiError(ERR_PROC_FAILED_PENDING, "MPI_ERR_PROC_FAILED_PENDING: a process is lost")
        if peer is not None and peer != ANY_SOURCE and self.known(rank, [context.ranks[peer]]):
            raise MpiError(ERR_PROC_FAILED, f"MPI_ERR_PROC_FAILED: rank {context.ranks[peer]} is lost")

    def of(self, request: Request) -> MpiError | None:
        """Why a request that has not ended will not do so, as its owner knows."""
        if isinstance(request, SurvivorRequest):
            return None
        owner = request.owner
        peers: Sequence[int]
        if isinstance(request, SendRequest):
            context, peers = request.context, [request.context.ranks[request.target]]
        elif isinstance(request, ReceiveRequest):
            context = request.context
            if request.message is not None and request.message.is_buffered:
                return None
            if request.source == ANY_SOURCE:
                if self.unacknowledged(owner, context):
                    return MpiError(ERR_PROC_FAILED_PENDING, "MPI_ERR_PROC_FAILED_PENDING: a process is lost")
                peers = []
            else:
                peers = [context.ranks[request.source]]
        else:
            assert isinstance(request, CollectiveRequest)
            context, peers = request.context, request.ranks
            if request.due < NEVER and not request.may_fail():
                return None
        if self.is_revoked(owner, context):
            return MpiError(ERR_REVOKED, "MPI_ERR_REVOKED: the communicator was revoked")
        lost = self.known(owner, peers)
        return MpiError(ERR_PROC_FAILED, f"MPI_ERR_PROC_FAILED: rank {lost[0]} is lost") if lost else None


class SurvivorCollective:
    """A Shrink or an agreement: of all members that are not lost."""

    def __init__(self, network: Network, context: Context, conclude: Callable[[dict[int, Any]], Any]) -> None:
        """conclude: makes the result of the contributions by rank; called once."""
        self._network, self._context, self._conclude = network, context, conclude
        self._requests: dict[int, SurvivorRequest] = {}
        self._given: dict[int, Any] = {}
        self.result: Any = None
        self.is_concluded = False

    def join(self, request: SurvivorRequest, given: Any) -> None:
        self._requests[request.owner], self._given[request.owner] = request, given
        self._network.touch_all()

    def advance(self) -> None:
        """Come to an end if nobody else is waited for."""
        network, failures = self._network, self._network.failures
        if self.is_concluded or failures is None:
            return
        callers = [rank for rank in self._requests if not network.is_lost(rank)]
        if network.is_cut(*callers):
            return
        missing = [rank for rank in self._context.ranks if rank not in self._requests]
        if not callers or any(len(failures.known(rank, missing)) < len(missing) for rank in callers):
            return
        self.is_concluded = True
        # Who was lost after its call is in or out, the same for all.
        counted = {
            rank: given
            for rank, given in self._given.items()
            if not network.is_lost(rank) or network.scheduler.random.random() < 0.5
        }
        self.result = self._conclude(counted)
        for request in self._requests.values():
            request.due = network.scheduler.now + network.delay(*self._context.ranks)
        network.touch_all()


class SurvivorRequest(Request):
    """What one rank has of it. flag: where the answer of an agreement is written."""

    def __init__(
        self, network: Network, owner: int, context: Context, name: str, conclude: Callable[[dict[int, Any]], Any]
    ) -> None:
        super().__init__(network, owner)
        self._context, self._name = context, name
        key = owner, name
        number = context.calls.get(key, 0)
        context.calls[key] = number + 1
        made = context.collectives.get((name, number))
        if made is None:
            made = context.collectives[name, number] = SurvivorCollective(network, context, conclude)
        self.collective: SurvivorCollective = made
        self.flag: np.ndarray[Any, Any] | None = None

    def has_ended(self) -> bool:
        self.collective.advance()
        if self.network.scheduler.now < self.due:
            return False
        if self.flag is not None:
            self.flag[...] = self.collective.result
        return True

    def land(self) -> None:
        """Nothing lands."""

    def raise_if_incomplete(self) -> None:
        """An agreement has its answer, and says if there are losses that this rank has not acknowledged."""
        failures = self.network.failures
        if failures is not None and failures.unacknowledged(self.owner, self._context):
            raise MpiError(ERR_PROC_FAILED, "MPI_ERR_PROC_FAILED: a process is lost")

    def __str__(self) -> str:
        return f"{self._name} of rank {self.owner} on {self._context}"


def begin_shrink(comm: Intracomm) -> SurvivorRequest:
    """Begin to make a communicator of the survivors. Its result is a context."""
    network, context = comm.network, comm.open()

    def conclude(given: dict[int, Any]) -> Context:
        return network.new_context([rank for rank in context.ranks if rank in given], f"shrunk {context.number}")

    request = SurvivorRequest(network, comm.owner, context, "Shrink", conclude)
    request.collective.join(request, None)
    return request


def begin_agreement(comm: Intracomm, flag: np.ndarray[Any, Any]) -> SurvivorRequest:
    """Begin to agree on the AND of all flags."""

    def conclude(given: dict[int, Any]) -> int:
        return int(np.bitwise_and.reduce(list(given.values())))

    request = SurvivorRequest(comm.network, comm.owner, comm.open(), "Iagree", conclude)
    request.flag = flag
    request.collective.join(request, int(flag.reshape(-1)[0]))
    return request
