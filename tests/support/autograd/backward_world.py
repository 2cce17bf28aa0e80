"""A few simulated workers with the protocol of a backward: messages are delivered when a test says so.

A program is a list of messages, each made after some that came to its sender. The gradient of a message is the number
of ways from the roots to it, so that a lost or doubled one shows.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial

from hvlike.autograd.protocol import BackwardMessage, BackwardPhase, BackwardState, Gradients, Mode

Key = tuple[int, int]
"""A backward: its root, its number."""


@dataclass
class Message:
    """One message with tensors that require grad."""

    number: int
    source: int
    to: int
    made_of: set[int]
    """Messages that came to its source before."""
    opened: bool = True
    """False while its receiver has not looked into it."""


@dataclass
class Program:
    """A forward pass."""

    size: int
    messages: list[Message]
    roots: dict[Key, set[int]]
    """What the roots are made of."""

    def gradients(self, key: Key) -> dict[int, int]:
        """The gradient of each message that a backward leads to."""
        found: dict[int, int] = {}
        for number in self.roots[key]:
            found[number] = found.get(number, 0) + 1
        for message in reversed(self.messages):
            for number in message.made_of if message.number in found else ():
                found[number] = found.get(number, 0) + found[message.number]
        return found


def random_program(rng: random.Random, size: int, *, late: bool = False, backwards: int = 1) -> Program:
    """Calls and answers among workers; late: some messages are opened only while the backward goes on."""
    messages: list[Message] = []
    for number in range(1, rng.randrange(2, 14)):
        source, to = rng.randrange(size), rng.randrange(size)
        message = Message(number, source, to, set())
        message.made_of = chosen(rng, messages, source)
        message.opened = not late or rng.random() < 0.7
        messages.append(message)
    roots: dict[Key, set[int]] = {}
    for number in range(backwards):
        root = rng.randrange(size)
        roots[root, number] = chosen(rng, messages, root)
    return Program(size, messages, roots)


def chosen(rng: random.Random, messages: list[Message], rank: int) -> set[int]:
    """Some of the messages that a worker has opened."""
    there = [message.number for message in messages if message.to == rank and message.opened]
    return set(rng.sample(there, rng.randrange(len(there) + 1)))


class SimulatedMachine:
    """The local part: a message that came gets its gradient when all that it leads to have got theirs."""

    def __init__(self, world: World, rank: int, key: Key) -> None:
        self.part: BackwardState
        self.resolved: dict[int, int] = {}
        self._world = world
        self._rank = rank
        self._roots = world.program.roots[key] if key[0] == rank else set()
        self._reached: set[int] = set()
        self._came: dict[int, Message] = {}
        self._sent: dict[int, Message] = {}
        self._open: set[int] = set()
        self._fails_at = world.failing.pop((key, rank), None)

    @property
    def finished(self) -> bool:
        return not self._open and not self._came

    def reach(self, sends: Collection[int] | None) -> Mapping[int, int]:
        starts = [self._roots] if sends is None else [self._world.message(number).made_of for number in sends]
        new = set().union(*starts) - self._reached
        self._reached |= new
        return {number: self._world.message(number).source for number in new}

    def engage(self, sends: Collection[int] | None) -> Mapping[int, int]:
        there = [each for each in self._world.program.messages if each.number not in self._world.withdrawn]
        sent = [each for each in there if each.source == self._rank and (sends is None or each.number in sends)]
        self._sent = {each.number: each for each in sent}
        self._open = set(self._sent)
        came = [each for each in there if each.to == self._rank and each.opened]
        reached = self._roots.union(*(each.made_of for each in sent))
        for message in came:
            if message.number in reached:
                self._came[message.number] = message
            elif sends is None:
                self.part.emit(message.number, message.source, None)
        return {each.number: each.to for each in sent}

    def resolve(self, message: int, gradients: Gradients | None) -> None:
        self._open.remove(message)
        if gradients is not None and gradients[0] is not None:
            self.resolved[message] = gradients[0]

    def step(self) -> None:
        if self._fails_at is not None:
            self._fails_at -= 1
            if self._fails_at < 0:
                raise ValueError("it fails here")
        for number, message in list(self._came.items()):
            users = [each.number for each in self._sent.values() if number in each.made_of]
            if not self._open.intersection(users):
                del self._came[number]
                values = [self.resolved[user] for user in users if user in self.resolved]
                values += [1] if number in self._roots else []
                self.part.emit(number, message.source, [sum(values) if values else None])

    def describe_unused(self, send: int, rank: int) -> str:
        return f"message {send} is not used"


class World:
    """Letters wait in one queue for each pair of workers and backward; `events` is what else may happen at any time."""

    def __init__(self, program: Program, mode: Mode, rng: random.Random) -> None:
        self.program = program
        self.mode = mode
        self.rng = rng
        self.withdrawn: set[int] = set()
        self.failing: dict[tuple[Key, int], int] = {}
        """Machines that raise, and at which step."""
        self.to_open = [message for message in program.messages if not message.opened]
        self.to_lose: list[int] = []
        self.to_release: list[int] = []
        self.lost: set[int] = set()
        self.released: set[int] = set()
        self.news: list[tuple[int, int]] = []
        """Survivors that have to hear of a lost worker."""
        self.parts: dict[tuple[int, Key], BackwardState] = {}
        self.machines: dict[tuple[int, Key], SimulatedMachine] = {}
        self.flying: dict[tuple[int, int], deque[tuple[Key, BackwardMessage]]] = {}
        self.sent: list[BackwardMessage] = []

    def message(self, number: int) -> Message:
        return self.program.messages[number - 1]

    def begin(self) -> None:
        """Begin all backwards."""
        for key in self.program.roots:
            self._turn(key[0], key, self._part(key[0], key).begin)

    def run_out(self) -> None:
        """Let everything happen, in random order."""
        for _ in range(100_000):
            steps = [("message", pair) for pair, queue in self.flying.items() if queue]
            steps += [("open", None)] * bool(self.to_open) + [("lose", None)] * bool(self.to_lose)
            steps += [("release", None)] * bool(self.to_release) + [("news", None)] * bool(self.news)
            if not steps:
                return
            what, pair = self.rng.choice(steps)
            if what == "message" and pair is not None:
                key, message = self.flying[pair].popleft()
                self._deliver(*pair, key, message)
            else:
                {"open": self._open, "lose": self._lose, "release": self._release, "news": self._tell}[what]()
        raise AssertionError("it never ends")

    def root_of(self, key: Key) -> BackwardState:
        return self.parts[key[0], key]

    def _part(self, rank: int, key: Key) -> BackwardState:
        part = self.parts.get((rank, key))
        if part is None:
            machine = self.machines[rank, key] = SimulatedMachine(self, rank, key)
            part = self.parts[rank, key] = machine.part = BackwardState(rank, self.mode, machine)
        return part

    def _deliver(self, source: int, to: int, key: Key, message: BackwardMessage) -> None:
        if to in self.lost:
            return
        if to in self.released:
            if message.asks or message.marks:
                self._post(to, source, key, BackwardMessage(error="no such context"))
            return
        if (to, key) in self.parts or message.opens:
            self._turn(to, key, lambda: self._part(to, key).receive(source, message))

    def _turn(self, rank: int, key: Key, event: Callable[[], object]) -> None:
        part = self._part(rank, key)
        event()
        try:
            part.advance()
        except ValueError as error:
            part.fail(str(error))
        messages = part.take_messages()
        for to, message in messages.items():
            self._post(rank, to, key, message)
        for to in set(messages) & self.lost:
            self._turn(rank, key, partial(part.lost, to, "it is gone"))
        if rank == key[0] and part.phase is BackwardPhase.FINISHED:
            self._check_over(key)

    def _post(self, source: int, to: int, key: Key, message: BackwardMessage) -> None:
        self.sent.append(message)
        self.flying.setdefault((source, to), deque()).append((key, message))

    def _check_over(self, key: Key) -> None:
        """The root returns: nobody works on it any more, and nothing is on its way that could begin anything."""
        for (rank, each), part in self.parts.items():
            if each == key and rank not in self.lost | self.released:
                assert part.phase is BackwardPhase.FINISHED, f"worker {rank} is {part.phase}"
        for queue in self.flying.values():
            assert not any(each == key and message.opens for each, message in queue)

    # -- what may happen at any time --------------------------------------------------------------

    def _running(self, rank: int) -> list[tuple[Key, BackwardState]]:
        return [(key, part) for (each, key), part in self.parts.items() if each == rank]

    def _open(self) -> None:
        message = self.to_open.pop(self.rng.randrange(len(self.to_open)))
        if {message.source, message.to} & (self.lost | self.released):
            return
        if self.rng.random() < 0.3:
            # Dropped, and its sender is told.
            self.withdrawn.add(message.number)
            for key, part in self._running(message.source):
                self._turn(message.source, key, partial(part.withdrawn, message.number))
            return
        message.opened = True
        for key, part in self._running(message.to):
            self._turn(message.to, key, partial(part.recorded, message.number, message.source))

    def _lose(self) -> None:
        gone = self.to_lose.pop()
        self.lost.add(gone)
        for pair, queue in self.flying.items():
            if gone in pair:
                queue.clear()
        self.news += [(rank, gone) for rank in range(self.program.size) if rank not in self.lost]

    def _tell(self) -> None:
        rank, gone = self.news.pop(self.rng.randrange(len(self.news)))
        for key, part in self._running(rank):
            self._turn(rank, key, partial(part.lost, gone, "it is gone"))

    def _release(self) -> None:
        rank = self.to_release.pop()
        for key, part in self._running(rank):
            self._turn(rank, key, partial(part.fail, "released"))
        self.released.add(rank)
