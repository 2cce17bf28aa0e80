"""Communicators and groups of a simulated MPI, as mpi4py has them: each rank has handles of its own."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NoReturn

import numpy as np
from support.simulation.machine.simulated_buffers import (
    ERRORS_RETURN,
    IN_PLACE,
    OPS,
    Array,
    Constant,
    Datatype,
    Op,
    elements_of,
    memory_of,
)
from support.simulation.machine.simulated_network import (
    ANY_SOURCE,
    ANY_TAG,
    Context,
    Message,
    Network,
    ProcessEnded,
    mpi_call,
)
from support.simulation.machine.simulated_requests import (
    Collective,
    CollectiveRequest,
    Part,
    ReceiveRequest,
    Request,
    SendRequest,
    Status,
)
from support.simulation.machine.simulated_ulfm import Failures, begin_agreement, begin_shrink

UNDEFINED = -32766
COMM_TYPE_SHARED = 1


def _nothing(ended: Any) -> None:
    """Of a collective, the result that is none."""


def _unpickle_all(collective: Collective) -> list[Any]:
    return [pickle.loads(collective.values[place]) for place in range(len(collective.values))]


class Group:
    """Ranks of the job in an order."""

    def __init__(self, network: Network, ranks: Sequence[int]) -> None:
        self.network = network
        self._ranks: tuple[int, ...] | None = tuple(ranks)

    @property
    def ranks(self) -> tuple[int, ...]:
        if self._ranks is None:
            self.network.refuse("a group is used after its Free")
        return self._ranks

    @property
    def size(self) -> int:
        return len(self.ranks)

    def Get_size(self) -> int:
        return self.size

    def Incl(self, ranks: Sequence[int]) -> Group:
        return Group(self.network, [self.ranks[position] for position in ranks])

    def Translate_ranks(self, ranks: Sequence[int], group: Group) -> list[int]:
        others = {rank: position for position, rank in enumerate(group.ranks)}
        return [others.get(self.ranks[position], UNDEFINED) for position in ranks]

    def Free(self) -> None:
        if self._ranks is None:
            self.network.refuse("a group is freed twice")
        self._ranks = None


class MatchedMessage:
    """A message that Improbe has found: nobody else receives it."""

    def __init__(self, comm: Intracomm, message: Message) -> None:
        self._comm = comm
        self.network, self.owner = comm.network, comm.owner
        self._message: Message | None = message

    @mpi_call
    def Irecv(self, buffer: Any) -> Request:
        message, self._message = self._message, None
        if message is None:
            self.network.refuse(f"rank {self.owner} receives a message twice that it has probed once")
        memory = self._comm.bytes_of(buffer, writes=True)[0]
        ends = message.source, message.target
        request = ReceiveRequest(self.network, message.context, ends, message.tag, memory, persistent=False)
        self.network.match(message, request)
        return request


class Comm:
    """A handle of one rank. Two are equal if they stand for the same communicator, or for none."""

    def __init__(self, network: Network, owner: int, context: Context | None) -> None:
        """owner: the rank of the job whose handle it is."""
        self.network = network
        self.owner = owner
        self.context = context
        self.made: Request | None = None  # Has to be over before the communicator is used

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Comm) and self.context is other.context

    __hash__ = None  # type: ignore[assignment]


class Intracomm(Comm):
    # -- local --------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return self._open().place[self.owner]

    @property
    def size(self) -> int:
        return len(self._open().ranks)

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.size

    def Get_group(self) -> Group:
        return Group(self.network, self._open().ranks)

    def Set_errhandler(self, handler: Constant) -> None:
        if self._open() and handler is not ERRORS_RETURN:
            self.network.refuse(f"error handler {handler} is not simulated")

    def Set_name(self, name: str) -> None:
        self._open().name = name

    def Get_name(self) -> str:
        return self._open().name

    def Abort(self, status: int = 0) -> NoReturn:
        self.network.tell("aborted", f"by rank {self.owner}, status {status}")
        if self.network.on_abort is not None:
            self.network.on_abort(self.owner, status)
        raise ProcessEnded(f"rank {self.owner} has called Abort({status})")

    @mpi_call
    def Free(self) -> None:
        self._open()
        self.context = None

    # -- fault tolerance ----------------------------------------------------------------------------

    @mpi_call
    def Revoke(self) -> None:
        self.failures.revoke(self.owner, self._open())

    @mpi_call
    def Is_revoked(self) -> bool:
        return self.failures.is_revoked(self.owner, self._open())

    @mpi_call
    def Get_failed(self) -> Group:
        return Group(self.network, self.failures.known(self.owner, self._open().ranks))

    @mpi_call
    def Ack_failed(self, num_to_ack: int | None = None) -> int:
        self.failures.acknowledge(self.owner, self._open())
        return len(self.failures.known(self.owner, self._open().ranks))

    @mpi_call
    def Shrink(self) -> Intracomm:
        request = begin_shrink(self)
        self.network.wait(request, "Shrink")
        return Intracomm(self.network, self.owner, request.collective.result)

    @mpi_call
    def Iagree(self, flag: Any) -> Request:
        return begin_agreement(self, flag)

    # -- point to point -----------------------------------------------------------------------------

    @mpi_call
    def Isend(self, buffer: Any, dest: int, tag: int = 0) -> Request:
        return self._send(buffer, dest, tag, persistent=False)

    @mpi_call
    def Irecv(self, buffer: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Request:
        return self._receive(buffer, source, tag, persistent=False)

    @mpi_call
    def Send_init(self, buffer: Any, dest: int, tag: int = 0) -> Request:
        return self._send(buffer, dest, tag, persistent=True)

    @mpi_call
    def Recv_init(self, buffer: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Request:
        return self._receive(buffer, source, tag, persistent=True)

    @mpi_call
    def Improbe(
        self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> MatchedMessage | None:
        message = self._find(source, tag, status, take=True)
        return None if message is None else MatchedMessage(self, message)

    @mpi_call
    def Iprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> bool:
        return self._find(source, tag, status, take=False) is not None

    # -- collectives --------------------------------------------------------------------------------

    @mpi_call
    def Iallreduce(self, sendbuf: Any, recvbuf: Any, op: Op = OPS["SUM"]) -> Request:
        target, datatype = self.bytes_of(recvbuf, writes=True)
        source = target if sendbuf is IN_PLACE else self.bytes_of(sendbuf)[0]
        count = target.nbytes // datatype.size
        if source.nbytes != target.nbytes or datatype.name == "BYTE":
            self.network.refuse(f"Iallreduce of {source.nbytes} bytes into {count} times {datatype.name}")

        def conclude(values: list[Array]) -> Array:
            result = values[0]
            for value in values[1:]:
                result = op.reduce(result, value)
            return result.view(np.uint8)

        def take(collective: Collective) -> None:
            target[:] = collective.result

        part = Part(f"Iallreduce of {count} {datatype.name} by {op.name}", lambda: elements_of(source, datatype), take)
        return self._join(part, conclude)

    @mpi_call
    def Ibcast(self, buffer: Any, root: int = 0) -> Request:
        return self._broadcast("Ibcast", buffer, root)

    @mpi_call
    def Bcast(self, buffer: Any, root: int = 0) -> None:
        self.network.wait(self._broadcast("Bcast", buffer, root), "Bcast")

    @mpi_call
    def Allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        source, target = self.bytes_of(sendbuf)[0], self.bytes_of(recvbuf, writes=True)[0]
        if target.nbytes != source.nbytes * self.size:
            self.network.refuse(f"Allgather of {source.nbytes} bytes from each of {self.size} into {target.nbytes}")

        def take(collective: Collective) -> None:
            target[:] = collective.result

        part = Part(f"Allgather of {source.nbytes} bytes", source.copy, take)
        self.network.wait(self._join(part, np.concatenate), "Allgather")

    @mpi_call
    def bcast(self, obj: Any = None, root: int = 0) -> Any:
        pickled = pickle.dumps(obj) if self.rank == root else b""
        needs = self._needs_of_broadcast(root, len(pickled))
        part = Part(f"bcast from {root}", lambda: pickled, lambda each: pickle.loads(each.values[root]), needs)
        return self._wait(part, "bcast")

    @mpi_call
    def allgather(self, sendobj: Any) -> list[Any]:
        pickled = pickle.dumps(sendobj)
        gathered: list[Any] = self._wait(Part("allgather", lambda: pickled, _unpickle_all), "allgather")
        return gathered

    @mpi_call
    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        pickled, is_root = pickle.dumps(sendobj), self.rank == root
        needs = (self.rank,) if self.network.roots_run_ahead and not is_root else None
        take = _unpickle_all if is_root else _nothing
        gathered: list[Any] | None = self._wait(Part(f"gather to {root}", lambda: pickled, take, needs), "gather")
        return gathered

    @mpi_call
    def Barrier(self) -> None:
        self._wait(Part("Barrier", lambda: None, _nothing), "Barrier")

    # -- new communicators --------------------------------------------------------------------------

    @mpi_call
    def Ibarrier(self) -> Request:
        return self._join(Part("Ibarrier", lambda: None, lambda collective: None))

    @mpi_call
    def Idup(self) -> tuple[Intracomm, Request]:
        copy = Intracomm(self.network, self.owner, None)

        def take(collective: Collective) -> None:
            copy.context = collective.result

        request = copy.made = self._join(Part("Idup", lambda: None, take), self._duplicate())
        return copy, request

    @mpi_call
    def Dup(self) -> Intracomm:
        part = Part("Dup", lambda: None, lambda each: Intracomm(self.network, self.owner, each.result))
        made: Intracomm = self._wait(part, "Dup", self._duplicate())
        return made

    @mpi_call
    def Split(self, color: int = 0, key: int = 0) -> Intracomm:
        return self._split("Split", color, key)

    @mpi_call
    def Split_type(self, split_type: int, key: int = 0) -> Intracomm:
        if split_type != COMM_TYPE_SHARED:
            self.network.refuse(f"Split_type({split_type}) is not simulated")
        return self._split("Split_type", self.network.node_of[self.owner], key)

    @mpi_call
    def Create_group(self, group: Group, tag: int = 0) -> Intracomm:
        ranks, network = group.ranks, self.network
        if self.owner not in ranks:
            network.refuse(f"rank {self.owner} calls Create_group for the ranks {ranks}")
        part = Part("Create_group", lambda: None, lambda each: Intracomm(network, self.owner, each.result))
        request = self._join(part, lambda values: network.new_context(ranks), ranks, (ranks, tag))
        network.wait(request, "Create_group")
        made: Intracomm = request.result
        return made

    # -- helpers ------------------------------------------------------------------------------------

    @property
    def failures(self) -> Failures:
        if self.network.failures is None:
            self.network.refuse(f"rank {self.owner} uses ULFM in a job without it")
        return self.network.failures

    def open(self) -> Context:
        return self._open()

    def _check_failures(self, peer: int | None = None) -> None:
        if self.network.failures is not None:
            self.network.failures.check(self.owner, self._open(), peer)

    def _open(self) -> Context:
        if self.made is not None and self.made.active:
            self.network.refuse(f"rank {self.owner} uses a duplicate before its Idup is over")
        if self.context is None:
            self.network.refuse(f"rank {self.owner} uses a communicator that it has freed, or COMM_NULL")
        return self.context

    def bytes_of(self, buffer: Any, *, writes: bool = False) -> tuple[Array, Datatype]:
        try:
            return memory_of(buffer, writes=writes)
        except ValueError as error:
            self.network.refuse(f"rank {self.owner}: {error}")

    def _check_peer(self, peer: int, tag: int, *, sends: bool) -> None:
        known = 0 <= peer < self.size or (peer == ANY_SOURCE and not sends)
        if not known or not (tag >= 0 or (tag == ANY_TAG and not sends)):
            self.network.refuse(f"rank {self.owner} names position {peer}, tag {tag} on {self._open()}")

    def _send(self, buffer: Any, target: int, tag: int, *, persistent: bool) -> Request:
        self._check_peer(target, tag, sends=True)
        if not persistent:
            self._check_failures(target)
        memory = self.bytes_of(buffer)[0]
        request = SendRequest(self.network, self._open(), (self.rank, target), tag, memory, persistent=persistent)
        if not persistent:
            request.begin()
        return request

    def _receive(self, buffer: Any, source: int, tag: int, *, persistent: bool) -> Request:
        self._check_peer(source, tag, sends=False)
        if not persistent:
            self._check_failures(source)
        memory = self.bytes_of(buffer, writes=True)[0]
        request = ReceiveRequest(self.network, self._open(), (source, self.rank), tag, memory, persistent=persistent)
        if not persistent:
            request.begin()
        return request

    def _find(self, source: int, tag: int, status: Status | None, *, take: bool) -> Message | None:
        self._check_peer(source, tag, sends=False)
        self._check_failures(source)
        message = self.network.endpoints[self.owner].find(self._open(), source, tag, take=take)
        if message is not None and status is not None:
            status.describe(message)
        return message

    def _broadcast(self, called: str, buffer: Any, root: int) -> CollectiveRequest:
        is_root = self.rank == root
        memory = self.bytes_of(buffer, writes=not is_root)[0]

        def take(collective: Collective) -> None:
            if not is_root:
                memory[:] = collective.values[root]

        give = memory.copy if is_root else lambda: None
        needs = self._needs_of_broadcast(root, memory.nbytes)
        return self._join(Part(f"{called} of {memory.nbytes} bytes from {root}", give, take, needs))

    def _needs_of_broadcast(self, root: int, nbytes: int) -> tuple[int, ...] | None:
        if not 0 <= root < self.size:
            self.network.refuse(f"rank {self.owner} broadcasts from {root} on {self._open()}")
        runs_ahead = self.network.roots_run_ahead and nbytes <= self.network.eager_limit
        return (root,) if runs_ahead else None

    def _split(self, called: str, color: int, key: int) -> Intracomm:
        network, ranks = self.network, self._open().ranks

        def conclude(values: list[tuple[int, int]]) -> dict[int, Context]:
            contexts = {}
            for each in sorted({color for color, _ in values if color != UNDEFINED}):
                members = sorted((key, place) for place, (color, key) in enumerate(values) if color == each)
                contexts[each] = network.new_context([ranks[place] for _, place in members])
            return contexts

        part = Part(
            called,
            lambda: (color, key),
            lambda collective: Intracomm(network, self.owner, collective.result.get(color)),
        )
        made: Intracomm = self._wait(part, called, conclude)
        return made

    def _duplicate(self) -> Callable[[list[Any]], Context]:
        network, ranks = self.network, self._open().ranks
        return lambda values: network.new_context(ranks)

    def _wait(self, part: Part, called: str, conclude: Callable[[list[Any]], Any] = _nothing) -> Any:
        request = self._join(part, conclude)
        self.network.wait(request, called)
        return request.result

    def _join(
        self,
        part: Part,
        conclude: Callable[[list[Any]], Any] = _nothing,
        ranks: Sequence[int] = (),
        key: Hashable = (),
    ) -> CollectiveRequest:
        context = self._open()
        self._check_failures()
        request = CollectiveRequest(self.network, self.owner, part)
        request.join(context, conclude, ranks or context.ranks, key)
        return request
