"""The messages of a simulated MPI: when they arrive, what they are matched with, when their memory is free again.

    Isend                 on its way          arrived, seen by          matched with           both
    bytes are buffered    until `arrival`     the next call of the      a receive, in the      requests
    if they are few                           receiver: `progress`      order of posting       are over

A message of few bytes is buffered, and its send is over soon, matched or not. The bytes of a longer one are read from
the memory of the sender when it is matched: whoever writes there too early is found out. What is received is written
when the receiver calls MPI once the time has come, also for a request that was abandoned. Times are virtual seconds.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any, Concatenate, NoReturn, ParamSpec, Protocol, TypeVar

from support.simulation.machine.simulated_buffers import Array

if TYPE_CHECKING:
    from support.simulation.machine.simulated_requests import ReceiveRequest, Request
    from support.simulation.machine.simulated_ulfm import Failures

ANY_SOURCE = ANY_TAG = -1
THREAD_SINGLE, THREAD_FUNNELED, THREAD_SERIALIZED, THREAD_MULTIPLE = range(4)
NEVER = math.inf


class Scheduler(Protocol):
    """Decides which simulated thread goes on. Exactly one runs at a time."""

    random: random.Random
    """The seeded generator of the job."""

    @property
    def now(self) -> float:
        """Virtual seconds."""

    @property
    def rank(self) -> int:
        """The rank of the simulated thread that runs now."""

    def switch(self, what: str) -> None:
        """Perhaps let other threads go on first."""

    def block(self, ready: Callable[[], bool], until: float | None, what: str, key: Hashable = None) -> bool:
        """Let other threads go on until `ready()` holds or, at the latest, it is `until`; returns ready's last answer.

        `ready` is asked by whatever thread runs, after `key` was touched. `now` is at least `until` afterwards where
        that was why it ended.
        """

    def change(self) -> None:
        """Something has changed that others may wait for."""

    def touch(self, key: Hashable) -> None:
        """What those wait for who have blocked with this key may have come true."""


class ProcessEnded(BaseException):
    """The process that calls is no more: it has called Abort, or was lost."""


class Caller(Protocol):
    """An object whose methods are calls of MPI by one rank."""

    network: Network
    owner: int


C = TypeVar("C", bound=Caller)
P = ParamSpec("P")
R = TypeVar("R")


def mpi_call(method: Callable[Concatenate[C, P], R]) -> Callable[Concatenate[C, P], R]:
    """Have a method switch threads and take in what has arrived, before it does anything."""

    what = f"mpi.{method.__name__}"

    @functools.wraps(method)
    def call(caller: C, /, *arguments: P.args, **named: P.kwargs) -> R:
        network, owner = caller.network, caller.owner
        network.enter(owner, method.__name__)
        try:
            network.scheduler.switch(what)
            network.endpoints[owner].progress()
            # Who finds a message there finds what was written before it was sent.
            network.scheduler.acquire()
            return method(caller, *arguments, **named)
        finally:
            network.leave(owner)

    return call


class Context:
    """Is shared by the handles of one communicator on all its ranks."""

    def __init__(self, number: int, ranks: Sequence[int], name: str) -> None:
        """ranks: those of the job, by position in the communicator."""
        self.number = number
        self.ranks = tuple(ranks)
        self.place = {rank: position for position, rank in enumerate(self.ranks)}
        self.name = name
        self.last_arrivals: dict[tuple[int, int], float] = {}  # By source and target
        self.calls: dict[Hashable, int] = {}  # Collectives that each rank has called
        self.collectives: dict[Hashable, Any] = {}  # Those that some ranks have still to call

    def __str__(self) -> str:
        return f"{self.name}#{self.number}"


@dataclass(eq=False)
class Message:
    """One that was sent. Source and target are positions in the communicator."""

    context: Context
    source: int
    target: int
    tag: int
    memory: Array  # The sender's
    number: int  # Of the message in the job, in the order of sending
    arrival: float
    buffered_at: float  # NEVER: It is read from the sender's memory once it is matched
    data: Array | None = None  # Its bytes, once they were read
    left_at: float = NEVER  # When the sender may use the memory again, if it was not buffered

    @property
    def is_buffered(self) -> bool:
        return self.buffered_at < NEVER

    @property
    def sender(self) -> int:
        return self.context.ranks[self.source]

    @property
    def receiver(self) -> int:
        return self.context.ranks[self.target]

    def read(self) -> Array:
        """Returns the bytes, read from the sender's memory the first time."""
        if self.data is None:
            self.data = self.memory.copy()
        return self.data

    def __str__(self) -> str:
        return f"{self.sender} -> {self.receiver}, tag {self.tag}, {self.memory.nbytes} bytes on {self.context}"


class Network:
    """The messages of a job on their way, and what may happen to them. Attributes may be set before the job runs."""

    def __init__(self, scheduler: Scheduler, nodes: Sequence[Sequence[int]]) -> None:
        self.scheduler = scheduler
        self.node_of = {rank: node for node, ranks in enumerate(nodes) for rank in ranks}
        self.size = len(self.node_of)
        assert sorted(self.node_of) == list(range(self.size)), f"nodes of other ranks than 0, 1, ...: {nodes}"
        self.inside_seconds = 1e-6, 20e-6  # The least and the longest delay between ranks of one node
        self.between_seconds = 10e-6, 200e-6  # The same for ranks of different nodes
        self.eager_limit = 4096  # Messages of so many bytes are buffered
        self.senders_must_call = False
        """Whether the bytes of a longer message leave only when its sender calls MPI again, once it was matched."""
        self.roots_run_ahead = False
        """Whether the root of a small broadcast, and who only gives to a gather, go on before the others have called:
        MPI allows both. Else a collective ends nowhere before all have called it."""
        self.sockets_tell = False
        """Whether messages between nodes come over sockets on which a rank can sleep."""
        self.thread_level = THREAD_SERIALIZED
        """What MPI supports. Below THREAD_MULTIPLE two threads of a rank must not be in calls at the same time."""
        self.trace: Callable[[str], None] | None = None
        self.explain: Callable[[Message], str] = lambda message: ""
        """Says in a trace what a message is."""
        self.on_abort: Callable[[int, int], object] | None = None
        """Told the rank and the status when Abort is called; after that, ProcessEnded is raised there."""
        self.violations: list[str] = []  # The texts of all assertions that have failed, whoever has caught them
        self.lost_at: dict[int, float] = {}
        self.cut: frozenset[int] = frozenset()  # Ranks to and from which nothing comes any more, but among themselves
        self.failures: Failures | None = None  # Where there is ULFM
        self.finalized: set[int] = set()
        self.endpoints = [Endpoint(self) for _ in range(self.size)]
        scheduler.next_event = self.next_event
        self._inside: dict[int, str] = {}  # The call that each rank is in
        self._messages = self._contexts = 0

    def refuse(self, text: str) -> NoReturn:
        self.violations.append(text)
        raise AssertionError(text)

    def tell(self, event: str, thing: object) -> None:
        if self.trace is not None:
            self.trace(f"{event} {thing}")

    def enter(self, rank: int, call: str) -> None:
        """Check that this rank may call MPI now."""
        if rank in self.lost_at:
            # Its threads are being ended: what they call on their way has no effect.
            self.scheduler.block(_never, None, f"mpi.{call}")
            raise ProcessEnded(f"rank {rank} was lost")
        if self.scheduler.rank != rank:
            self.refuse(f"rank {self.scheduler.rank} calls {call} with an object of rank {rank}")
        if rank in self.finalized:
            self.refuse(f"rank {rank} calls {call} after Finalize")
        if self.thread_level < THREAD_MULTIPLE:
            if rank in self._inside:
                self.refuse(f"a thread of rank {rank} calls {call} while another one is in {self._inside[rank]}")
            self._inside[rank] = call

    def leave(self, rank: int) -> None:
        self._inside.pop(rank, None)

    def lose(self, rank: int) -> None:
        """The process of a rank has vanished. What it had sent and was buffered still arrives; nothing else of it, nor
        what waits for it, is ever over. Its threads must not run any more.
        """
        self.lost_at.setdefault(rank, self.scheduler.now)
        if self.failures is not None:
            self.failures.lose(rank)
        self.touch_all()
        self.tell("lost", f"rank {rank}")

    def cut_off(self, node: int) -> None:
        """The link of a node fails for good; MPI does not notice before TCP gives up."""
        self.cut = frozenset(rank for rank, place in self.node_of.items() if place == node)
        for endpoint in self.endpoints:
            kept = [each for each in endpoint.arriving if not self.is_cut(each[2].sender, each[2].receiver)]
            endpoint.arriving = kept
            heapify(kept)
        if self.failures is not None:
            self.failures.part(self.cut)
        self.tell("cut", f"the link of node {node}")

    def is_cut(self, *ranks: int) -> bool:
        """Whether some of these ranks are out of reach of the others."""
        return bool(self.cut) and 0 < sum(rank in self.cut for rank in ranks) < len(ranks)

    def next_event(self, rank: int) -> float:
        """When a call of this rank finds something that it does not find now."""
        endpoint = self.endpoints[rank]
        moment = NEVER if self.failures is None else self.failures.next_moment()
        return min(endpoint.next_event(), moment, *(request.due for request in endpoint.landing))

    def touch_all(self) -> None:
        """What anybody waits for may have come true."""
        self.scheduler.change()
        for endpoint in self.endpoints:
            self.scheduler.touch(endpoint)

    def is_lost(self, rank: int, when: float = NEVER) -> bool:
        """Whether it was lost before that time."""
        return self.lost_at.get(rank, NEVER) < when

    def new_context(self, ranks: Sequence[int], name: str = "comm") -> Context:
        self._contexts += 1
        return Context(self._contexts - 1, ranks, name)

    def delay(self, *ranks: int) -> float:
        """Draw the seconds of something in which these ranks take part."""
        inside = len({self.node_of[rank] for rank in ranks}) == 1
        return self.scheduler.random.uniform(*(self.inside_seconds if inside else self.between_seconds))

    def send(self, context: Context, source: int, target: int, tag: int, memory: Array) -> Message:
        now, ends = self.scheduler.now, (context.ranks[source], context.ranks[target])
        # Messages of one pair do not overtake each other.
        arrival = max(now + self.delay(*ends), context.last_arrivals.get((source, target), 0.0))
        context.last_arrivals[source, target] = arrival
        buffered_at = NEVER
        if memory.nbytes <= self.eager_limit:
            buffered_at = now + self.scheduler.random.choice((0.0, self.delay(*ends)))
        message = Message(context, source, target, tag, memory, self._messages, arrival, buffered_at)
        self._messages += 1
        if buffered_at == now:
            message.read()
        if self.trace is not None:
            self.trace(f"sent {message}{self.explain(message)}")
        if self.is_cut(*ends):
            return message
        receiver = self.endpoints[ends[1]]
        heappush(receiver.arriving, (arrival, message.number, message))
        if self.node_of[ends[0]] != self.node_of[ends[1]]:
            receiver.wire(arrival)
            if now < buffered_at < NEVER:
                self.endpoints[ends[0]].wire(buffered_at)
        self.scheduler.change()
        self.scheduler.touch(receiver)
        return message

    def match(self, message: Message, request: ReceiveRequest) -> None:
        self.tell("matched", message)
        request.message = message
        now = self.scheduler.now
        if message.is_buffered:
            request.due = now
            request.land()
        elif self.senders_must_call:
            when = now + self.delay(message.sender, message.receiver)
            sender = self.endpoints[message.sender]
            heappush(sender.asked, (when, message.number, message, request))
            if self.node_of[message.sender] != self.node_of[message.receiver]:
                sender.wire(when)
            self.scheduler.change()
            self.scheduler.touch(sender)
        else:
            self.transfer(message, request)

    def transfer(self, message: Message, request: ReceiveRequest) -> None:
        """The bytes of a long message leave. Who is lost before they are there lets the other one wait for ever."""
        ends = message.sender, message.receiver
        if self.is_cut(*ends):
            return
        message.read()
        message.left_at, request.due = (self.scheduler.now + self.delay(*ends) for _ in range(2))
        self.endpoints[ends[1]].landing.append(request)
        if self.node_of[ends[0]] != self.node_of[ends[1]]:
            self.endpoints[ends[0]].wire(message.left_at)
            self.endpoints[ends[1]].wire(request.due)
        self.scheduler.change()
        for each in ends:
            self.scheduler.touch(self.endpoints[each])

    def wait(self, request: Request, what: str) -> None:
        """Block until the request is over, and have MPI go on with everything of this rank meanwhile."""
        endpoint = self.endpoints[request.owner]

        def soonest() -> float:
            moment = NEVER if self.failures is None else self.failures.next_moment()
            return min(request.due, endpoint.next_event(), moment)

        while not request.has_ended():
            request.check_failure()
            until = soonest()
            ready = functools.partial(_is_ready, request, soonest, until)
            self.scheduler.block(ready, until if until < NEVER else None, f"mpi.{what}", endpoint)
            endpoint.progress()


def _never() -> bool:
    return False


def _is_ready(request: Request, soonest: Callable[[], float], until: float) -> bool:
    return request.has_ended() or soonest() < until or request.has_failed()


class Endpoint:
    """What a rank has to do with messages: its part of the network."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.arriving: list[tuple[float, int, Message]] = []  # A heap
        self.asked: list[tuple[float, int, Message, ReceiveRequest]] = []
        """A heap of messages of this rank that were matched, whose bytes leave when it calls MPI."""
        self.landing: list[Request] = []  # What is over once it is due
        self._events: list[float] = []
        """A heap: when a socket to another node tells of something; of each once, as edge-triggered epoll(7) does."""
        self._unexpected: dict[int, list[Message]] = {}  # By communicator
        self._posted: dict[int, list[ReceiveRequest]] = {}

    def progress(self) -> None:
        """Take in what has arrived, write what is due. Only in calls of this rank."""
        network, now = self.network, self.network.scheduler.now
        while self.arriving and self.arriving[0][0] <= now:
            message = heappop(self.arriving)[2]
            if not (message.is_buffered and network.is_lost(message.sender, message.buffered_at)):
                self._take(message)
        while self.asked and self.asked[0][0] <= now:
            network.transfer(*heappop(self.asked)[2:])
        if self.landing:
            due = [request for request in self.landing if request.due <= now]
            self.landing = [request for request in self.landing if request.due > now]
            for request in due:
                request.land()

    def next_event(self) -> float:
        """When something arrives that a call would take in."""
        return min(self.arriving[0][0] if self.arriving else NEVER, self.asked[0][0] if self.asked else NEVER)

    def wire(self, when: float) -> None:
        """A socket to another node will tell of something then: bytes, or room to write."""
        heappush(self._events, when)

    def next_told(self) -> float:
        """When the next socket tells of something that `take_events` has not taken."""
        return self._events[0] if self._events else NEVER

    def take_events(self) -> bool:
        """What sockets have told until now, and whether that is anything; they tell of it no more."""
        now, found = self.network.scheduler.now, False
        while self._events and self._events[0] <= now:
            heappop(self._events)
            found = True
        return found

    def post(self, request: ReceiveRequest) -> None:
        message = self.find(request.context, request.source, request.tag, take=True)
        if message is None:
            self._posted.setdefault(request.context.number, []).append(request)
        else:
            self.network.match(message, request)

    def withdraw(self, request: ReceiveRequest) -> bool:
        """Forget a receive; False where it was matched already."""
        posted = self._posted.get(request.context.number, [])
        if request not in posted:
            return False
        posted.remove(request)
        return True

    def find(self, context: Context, source: int, tag: int, *, take: bool) -> Message | None:
        """The first message that has arrived and fits. take: it is matched by that."""
        messages = self._unexpected.get(context.number, [])
        for place, message in enumerate(messages):
            if source in (ANY_SOURCE, message.source) and tag in (ANY_TAG, message.tag):
                return messages.pop(place) if take else message
        return None

    def _take(self, message: Message) -> None:
        posted = self._posted.get(message.context.number, [])
        for place, request in enumerate(posted):
            if request.source in (ANY_SOURCE, message.source) and request.tag in (ANY_TAG, message.tag):
                del posted[place]
                self.network.match(message, request)
                return
        self._unexpected.setdefault(message.context.number, []).append(message)
