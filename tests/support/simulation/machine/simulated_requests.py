"""The requests of a simulated MPI: sends, receives and collectives that are under way, and checks of their use."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from support.simulation.machine.simulated_buffers import Array
from support.simulation.machine.simulated_network import ANY_SOURCE, ANY_TAG, NEVER, Context, Message, Network, mpi_call

ERR_TRUNCATE = 15


class MpiError(RuntimeError):
    """An error of MPI, as communicators with ERRORS_RETURN have them raised."""

    def __init__(self, error_class: int, text: str) -> None:
        super().__init__(text)
        self._error_class = error_class

    def Get_error_class(self) -> int:
        return self._error_class


class Status:
    """Describes a message that was found or received."""

    def __init__(self) -> None:
        self._message: Message | None = None

    def describe(self, message: Message) -> None:
        self._message = message

    def Get_source(self) -> int:
        return ANY_SOURCE if self._message is None else self._message.source

    def Get_tag(self) -> int:
        return ANY_TAG if self._message is None else self._message.tag

    def Get_error(self) -> int:
        return 0

    def Get_count(self, datatype: Any) -> int:
        return 0 if self._message is None else int(self._message.memory.nbytes // datatype.size)


class Request:
    """Something that is under way. One that is not persistent becomes null once Test or Wait have said it is over."""

    def __init__(self, network: Network, owner: int, *, persistent: bool = False) -> None:
        self.network = network
        self.owner = owner
        self._persistent = persistent
        self._freed = False
        self.active = not persistent  # From its start until Test or Wait have said that it is over
        self.due = NEVER  # When it will be over, as far as that is known
        self.message: Message | None = None
        self.error = ""

    @mpi_call
    def Test(self, status: Status | None = None) -> bool:
        self._check("Test")
        if self.active and not self.has_ended():
            self.check_failure()
            return False
        self._conclude(status)
        return True

    @mpi_call
    def Get_status(self, status: Status | None = None) -> bool:
        self._check("Get_status")
        if self.active and not self.has_ended():
            return self.looks_ended()
        if status is not None and self.message is not None:
            status.describe(self.message)
        self.raise_if_incomplete()
        return True

    @mpi_call
    def Wait(self, status: Status | None = None) -> bool:
        self._check("Wait")
        if self.active:
            self.network.wait(self, "Wait")
        self._conclude(status)
        return True

    @mpi_call
    def Start(self) -> None:
        self._check("Start")
        if not self._persistent:
            self.network.refuse(f"rank {self.owner} calls Start of a request that is not persistent: {self}")
        if self.active:
            self.network.refuse(f"rank {self.owner} calls Start of a request that is under way: {self}")
        self.check_start()
        self.active = True
        self.begin()

    @mpi_call
    def Cancel(self) -> None:
        self._check("Cancel")
        if not self.active:
            self.network.refuse(f"rank {self.owner} calls Cancel of a request that is not under way: {self}")
        self.cancel()

    @mpi_call
    def Free(self) -> None:
        self._check("Free")
        if not (self._persistent or self.active):
            self.network.refuse(f"rank {self.owner} calls Free of a request that is over: {self}")
        self._freed = True

    def begin(self) -> None:
        """Send or post what this request is for."""
        raise NotImplementedError

    def has_ended(self) -> bool:
        raise NotImplementedError

    def land(self) -> None:
        """It is due: write what was received."""
        raise NotImplementedError

    def check_start(self) -> None:
        """Raise where a message cannot be sent or received again."""

    def has_failed(self) -> bool:
        """Whether its owner knows that it will not end; since a moment, perhaps, when its rank was held up."""
        return self.network.failures is not None and self.network.failures.of(self) is not None

    def check_failure(self) -> None:
        """Raise where this request will not end, for a process is lost or the communicator revoked."""
        error = None if self.network.failures is None else self.network.failures.of(self)
        if error is not None:
            self.active = False
            self.fail()
            raise error

    def fail(self) -> None:
        """Test or Wait raise: what is not persistent is freed by that."""

    def looks_ended(self) -> bool:
        """What Get_status says of a request that has not ended."""
        return False

    def raise_if_incomplete(self) -> None:
        """What Get_status raises of a request that has ended."""

    def cancel(self) -> None:
        self.network.refuse(f"rank {self.owner} calls Cancel of a request that is no receive: {self}")

    def _check(self, call: str) -> None:
        if self._freed:
            self.network.refuse(f"rank {self.owner} calls {call} of a request after its Free: {self}")

    def _conclude(self, status: Status | None) -> None:
        self.active = False
        if status is not None and self.message is not None:
            status.describe(self.message)
        error, self.error = self.error, ""
        if error:
            raise MpiError(ERR_TRUNCATE, error)


class SendRequest(Request):
    def __init__(
        self, network: Network, context: Context, ends: tuple[int, int], tag: int, memory: Array, *, persistent: bool
    ) -> None:
        """ends: the source and the target."""
        super().__init__(network, context.ranks[ends[0]], persistent=persistent)
        self._parts = context, *ends, tag, memory
        self.context, self.target = context, ends[1]

    def check_start(self) -> None:
        if self.network.failures is not None:
            self.network.failures.check(self.owner, self.context, self.target)

    def fail(self) -> None:
        if not self._persistent and self.message is not None and not self.message.is_buffered:
            self.network.refuse(f"rank {self.owner} frees a request that has failed and may still end: {self}")

    def begin(self) -> None:
        self.message = self.network.send(*self._parts)
        self.due = self.message.buffered_at

    def has_ended(self) -> bool:
        message = self.message
        assert message is not None
        if not message.is_buffered:
            # It was not known before the match.
            self.due = NEVER if self.network.is_lost(message.receiver, message.left_at) else message.left_at
        if self.network.scheduler.now < self.due:
            return False
        message.read()
        return True

    def __str__(self) -> str:
        context, source, target, tag, memory = self._parts
        return f"send {context.ranks[source]} -> {context.ranks[target]}, tag {tag}, {memory.nbytes} bytes on {context}"


class ReceiveRequest(Request):
    def __init__(
        self, network: Network, context: Context, ends: tuple[int, int], tag: int, memory: Array, *, persistent: bool
    ) -> None:
        """ends: the source and the target."""
        super().__init__(network, context.ranks[ends[1]], persistent=persistent)
        self.context, self.source, self.tag = context, ends[0], tag
        self._memory = memory
        self._landed = False

    def check_start(self) -> None:
        if self.network.failures is not None:
            self.network.failures.check(self.owner, self.context, self.source)

    def begin(self) -> None:
        self._landed, self.due, self.message = False, NEVER, None
        self.network.endpoints[self.owner].post(self)

    def has_ended(self) -> bool:
        return self._landed

    def land(self) -> None:
        message = self.message
        assert message is not None
        if not message.is_buffered and self.network.is_lost(message.sender, self.due):
            self.due = NEVER
            return
        data, room = message.read(), self._memory.nbytes
        self._memory[: data.nbytes] = data[:room]
        self._landed = True
        if data.nbytes > room:
            self.error = f"MPI_ERR_TRUNCATE: message truncated: {message}, received in {room} bytes"
        self.network.tell("delivered", message)

    def cancel(self) -> None:
        if self.network.endpoints[self.owner].withdraw(self):
            self._landed = True

    def __str__(self) -> str:
        source = "any rank" if self.source == ANY_SOURCE else f"rank {self.context.ranks[self.source]}"
        return f"receive of rank {self.owner} from {source}, tag {self.tag}, on {self.context}"


@dataclasses.dataclass
class Part:
    """What one rank has called and brings to a collective."""

    called: str  # The same on all ranks
    give: Callable[[], Any]  # Read its contribution
    take: Callable[[Collective], Any]  # Write what it gets; returns the result of a call that blocks
    needs: tuple[int, ...] | None = None  # The positions without whose call it cannot end; None: all


class Collective:
    """One collective of all ranks of a communicator: their n-th calls belong together."""

    def __init__(self, network: Network, ranks: Sequence[int], name: str, conclude: Callable[[list[Any]], Any]) -> None:
        """conclude: make the result from the contributions in the order of positions, where all are needed."""
        self.place = {rank: position for position, rank in enumerate(ranks)}
        self.values: dict[int, Any] = {}  # Contributions by position
        self.result: Any = None
        self.network = network
        self._ranks = ranks
        self._name = name
        self._conclude = conclude
        node = network.node_of[ranks[0]]
        self._ends = ranks[0], next((rank for rank in ranks if network.node_of[rank] != node), ranks[0])
        self._requests: dict[int, CollectiveRequest] = {}  # By position
        self._waiting: list[CollectiveRequest] = []
        self._runs_ahead = self._concluded = False

    @property
    def is_complete(self) -> bool:
        return len(self._requests) == len(self._ranks)

    def join(self, request: CollectiveRequest) -> None:
        self._requests[self.place[request.owner]] = request
        self._check(request.part.called)
        self._waiting.append(request)
        self._runs_ahead |= request.part.needs is not None
        if self.is_complete or self._runs_ahead:
            self._waiting.sort(key=lambda each: each.owner)
            ready = [each for each in self._waiting if self._has_all(each.part.needs)]
            self._waiting = [each for each in self._waiting if each not in ready]
            for each in ready:
                self._settle(each)

    def _check(self, called: str) -> None:
        if called != next(iter(self._requests.values())).part.called:
            calls = sorted((each.owner, each.part.called) for each in self._requests.values())
            self.network.refuse(f"{self._name}: " + ", ".join(f"rank {rank} calls {text}" for rank, text in calls))

    def _has_all(self, needs: tuple[int, ...] | None) -> bool:
        return self.is_complete if needs is None else all(each in self._requests for each in needs)

    def _settle(self, request: CollectiveRequest) -> None:
        """All whose calls this rank needs have called."""
        network, needs = self.network, request.part.needs
        positions = range(len(self._ranks)) if needs is None else needs
        if network.lost_at and any(network.is_lost(self._ranks[position]) for position in positions):
            return
        if network.is_cut(*self._ranks):
            return
        if len(self.values) < len(self._ranks):
            for position in positions:
                if position not in self.values:
                    self.values[position] = self._requests[position].part.give()
        if needs is None and not self._concluded:
            self._concluded = True
            self.result = self._conclude([self.values[position] for position in positions])
            network.tell("joined", f"{self._name}: {request.part.called}")
        request.due = network.scheduler.now + network.delay(*self._ends)
        endpoint = network.endpoints[request.owner]
        endpoint.landing.append(request)
        if self._ends[0] != self._ends[1]:
            endpoint.wire(request.due)
        network.scheduler.change()
        network.scheduler.touch(endpoint)


class CollectiveRequest(Request):
    def __init__(self, network: Network, owner: int, part: Part) -> None:
        super().__init__(network, owner)
        self.part = part
        self.result: Any = None
        self._collective: Collective | None = None
        self._landed = False
        self._may_fail: bool | None = None

    def may_fail(self) -> bool:
        """Whether it fails on this member where it could have ended before the loss was known."""
        if self._may_fail is None:
            self._may_fail = self.network.scheduler.random.random() < 0.3
        return self._may_fail

    def looks_ended(self) -> bool:
        failures = self.network.failures
        return failures is not None and failures.of(self) is not None and self.may_fail()

    def join(self, context: Context, conclude: Callable[[list[Any]], Any], ranks: Sequence[int], key: Hashable) -> None:
        """Call it. ranks: those of the job that do. key: tells collectives of other groups apart."""
        self.context, self.ranks = context, ranks
        number = context.calls.get((self.owner, key), 0)
        context.calls[self.owner, key] = number + 1
        collective = context.collectives.get((key, number))
        if collective is None:
            name = f"collective {number} on {context}"
            collective = context.collectives[key, number] = Collective(self.network, ranks, name, conclude)
        self._collective = collective
        collective.join(self)
        if collective.is_complete:
            del context.collectives[key, number]

    def has_ended(self) -> bool:
        return self._landed

    def land(self) -> None:
        assert self._collective is not None
        self.result = self.part.take(self._collective)
        self._landed = True

    def __str__(self) -> str:
        return f"{self.part.called} of rank {self.owner}"
