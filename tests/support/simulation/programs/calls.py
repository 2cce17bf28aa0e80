"""Random programs that make every call of the API: under names that come again, or none, one after the other or several
at a time, polled, waited for late or never, from two threads, in sessions one after the other.

Reductions are repeated until they run inline, across the kinds of tensors for which they may.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from support.simulation.programs.parts import expect
from torch import Tensor

from hvlike.backends.inline_allreduce import WAIT_SECONDS
from hvlike.errors import MismatchError

BLOCKING = (
    "allreduce",
    "allreduce_",
    "grouped",
    "allgather",
    "broadcast_",
    "alltoall",
    "reducescatter",
    "object",
    "objects",
    "barrier",
)
ENDS = ("synchronize", "poll", "dropped")
DTYPES = (torch.float32, torch.float32, torch.float64, torch.float16, torch.int64)
LENGTHS = (1, 4, 4, 700, 20_000)
IN_PLACE_LENGTH = 300_000  # Ranks of a node reach into each other's tensors
MOST_POLLS = 200
SHORT_SLEEP_SECONDS = 0.02


@dataclass(frozen=True)
class Call:
    """One call, as all ranks make it; or a repeated one."""

    what: str
    name: str | None
    length: int
    dtype: torch.dtype
    root: int
    end: str  # Of what is begun beforehand
    late: int  # After how many further calls it ends
    times: int


@dataclass
class Session:
    """From init() to shutdown()."""

    calls: list[Call]
    beside: int  # How many reductions another thread makes meanwhile, in a process set of its own
    joins: bool


@dataclass
class Calls:
    """Sessions one after the other."""

    sessions: list[Session]

    @classmethod
    def draw(cls, seed: int, size: int) -> Calls:
        """Draw one."""
        draw = random.Random(seed)

        def call(number: int) -> Call:
            begun = draw.random() < 0.3
            what = draw.choice(("allreduce", "allgather", "broadcast")) if begun else draw.choice(BLOCKING)
            # Of what may be under way another one must not have the name.
            name = f"begun {number}" if begun else draw.choice([None, "loss", what])
            return Call(
                what,
                name,
                draw.choice(LENGTHS),
                draw.choice(DTYPES),
                draw.randrange(size),
                draw.choice(ENDS) if begun else "",
                draw.randint(0, 3),
                draw.choice([1, 1, 2, 5]),
            )

        sessions = [
            Session(
                [call(number) for number in range(draw.randint(1, 7))],
                draw.choice([0, 0, 0, 1, 4]),
                draw.random() < 0.2,
            )
            for _ in range(draw.choice([1, 1, 2]))
        ]
        return cls(sessions)

    def __call__(self, hvd: Any, rank: int) -> None:
        for session in self.sessions:
            hvd.init()
            Caller(hvd, rank).make(session)
            hvd.shutdown()


class Caller:
    """A rank that makes the calls of a session."""

    def __init__(self, hvd: Any, rank: int) -> None:
        self.hvd = hvd
        self.rank, self.size = rank, hvd.size()
        self.ends: list[tuple[int, Callable[[], None]]] = []  # Of what is under way: after which call, and how

    def make(self, session: Session) -> None:
        """Make all calls, and check what they return."""
        from hvlike.system.system import system

        found: list[float] = []
        thread = None
        if session.beside and self.size > 1:
            # A set of all ranks would be the global one.
            members = self.hvd.add_process_set([0] if self.size == 2 else [0, self.size - 1])
            if members.included():
                thread = system.Thread(target=lambda: self.reduce_beside(members, session.beside, found), name="beside")
                thread.start()
        for number, call in enumerate(session.calls):
            for _ in range(call.times if not call.end else 1):
                self.take(call, number)
            for _, end in [each for each in self.ends if each[0] <= number]:
                end()
            self.ends = [each for each in self.ends if each[0] > number]
        for _, end in self.ends:
            end()
        if thread is not None:
            thread.join()
            assert len(found) == session.beside, f"rank {self.rank}: the other thread has failed"
        if session.joins:
            self.hvd.join()
        elif any(call.end == "dropped" for call in session.calls):
            # What nobody waits for is given up by a rank that leaves before all have asked for it.
            self.hvd.barrier()

    def reduce_beside(self, members: Any, times: int, found: list[float]) -> None:
        """What another thread does."""
        ranks = members.ranks
        for number in range(times):
            mine = torch.full((3,), self.rank + 1.0 + number)
            total = self.hvd.allreduce(mine, op=self.hvd.Sum, process_set=members, name="beside")
            wanted = sum(each + 1.0 + number for each in ranks)
            expect(total, torch.full((3,), wanted), f"rank {self.rank}: beside {number}")
            found.append(wanted)

    def mine(self, call: Call, rank: int) -> Tensor:
        """What a rank gives; its sum over the ranks fits into 16 bits."""
        return (torch.arange(call.length) % 7 + rank + 1).to(call.dtype)

    def take(self, call: Call, number: int) -> None:
        """Make a call, and check what it returns, now or later."""
        hvd, what = self.hvd, f"rank {self.rank}: call {number}, {call.what}"
        everybody = [self.mine(call, each) for each in range(self.size)]
        mine, total = everybody[self.rank].clone(), torch.stack(everybody).sum(0).to(call.dtype)
        if call.end:
            handle, wanted = self.begin(call, mine, everybody, total)
            self.ends.append((number + call.late, lambda: self.end(call, handle, wanted, what)))
        elif call.what == "allreduce":
            expect(hvd.allreduce(mine, op=hvd.Sum, name=call.name), total, what)
        elif call.what == "allreduce_":
            expect(hvd.allreduce_(mine, op=hvd.Sum, name=call.name), total, what)
            expect(mine, total, f"{what}, in place")
        elif call.what == "grouped":
            for found in hvd.grouped_allreduce([mine, mine.clone()], op=hvd.Sum, name=call.name):
                expect(found, total, what)
        elif call.what == "allgather":
            rows = torch.full((self.rank % 3, 2), float(self.rank))
            wanted = torch.cat([torch.full((each % 3, 2), float(each)) for each in range(self.size)])
            expect(hvd.allgather(rows, name=call.name), wanted, what)
        elif call.what == "broadcast_":
            expect(hvd.broadcast_(mine, call.root, name=call.name), everybody[call.root], what)
        elif call.what == "alltoall":
            sent = torch.tensor([10.0 * self.rank + each for each in range(self.size)])
            found = hvd.alltoall(sent, name=call.name)
            expect(found, torch.tensor([10.0 * each + self.rank for each in range(self.size)]), what)
        elif call.what == "reducescatter":
            rows = torch.arange(2.0 * self.size) + self.rank
            lines = torch.stack([torch.arange(2.0 * self.size) + each for each in range(self.size)]).sum(0)
            found = hvd.reducescatter(rows, op=hvd.Sum, name=call.name)
            expect(found, lines[2 * self.rank : 2 * self.rank + 2], what)
        elif call.what == "object":
            expect(
                hvd.broadcast_object({self.rank: "x" * call.length}, call.root), {call.root: "x" * call.length}, what
            )
        elif call.what == "objects":
            expect(hvd.allgather_object((self.rank, number)), [(each, number) for each in range(self.size)], what)
        else:
            hvd.barrier()

    def begin(self, call: Call, mine: Tensor, everybody: list[Tensor], total: Tensor) -> tuple[Any, Tensor]:
        """Begin a call; its handle, and what it is to return."""
        hvd = self.hvd
        if call.what == "allreduce":
            return hvd.allreduce_async(mine, op=hvd.Sum, name=call.name), total
        if call.what == "allgather":
            return hvd.allgather_async(mine, name=call.name), torch.cat(everybody)
        return hvd.broadcast_async(mine, call.root, name=call.name), everybody[call.root]

    def end(self, call: Call, handle: Any, wanted: Tensor, what: str) -> None:
        """End a call, in its way."""
        if call.end == "dropped":
            return
        if call.end == "poll":
            for _ in range(MOST_POLLS):
                if self.hvd.poll(handle):
                    break
        expect(self.hvd.synchronize(handle), wanted, what)


@dataclass
class Inline:
    """Reductions of which ranks are late for about as long as the others wait before they withdraw."""

    calls: list[tuple[int, str | None]]  # Lengths and names
    late: list[dict[int, float]]  # Which ranks sleep before, and how long
    between: list[int]
    """How many calls later a reduction ends that is begun before; 0: none. So a rank may go ahead of others."""

    @classmethod
    def draw(cls, seed: int, size: int) -> Inline:
        """Draw one."""
        draw = random.Random(seed)
        lengths = draw.choice([LENGTHS, LENGTHS, (*LENGTHS, IN_PLACE_LENGTH)])
        calls = [(draw.choice(lengths), draw.choice([None, "loss"])) for _ in range(draw.randint(8, 24))]
        waits = [0.0, 1e-4, WAIT_SECONDS, *(WAIT_SECONDS + each * 1e-5 for each in (-9, -3, -1, 1, 3, 9))]
        late = [
            {rank: draw.choice(waits) for rank in draw.sample(range(size), draw.choice([0, 0, 1, 1, 2]) % size)}
            for _ in calls
        ]
        most = draw.choice([0, 0, 3])
        return cls(calls, late, [draw.randint(0, most) for _ in calls])

    def __call__(self, hvd: Any, rank: int) -> None:
        from hvlike.system.system import system

        hvd.init()
        total = sum(range(1, hvd.size() + 1))
        begun: list[tuple[int, Any, Tensor]] = []
        for number, ((length, name), late) in enumerate(zip(self.calls, self.late, strict=True)):
            if rank in late:
                system.sleep(late[rank])
            if self.between[number]:
                mine = torch.full((3,), float(rank + number))
                handle = hvd.allreduce_async_(mine, op=hvd.Sum, name=f"begun {number}")
                wanted = torch.full((3,), float(total - hvd.size() + hvd.size() * number))
                begun.append((number + self.between[number], handle, wanted))
            found = hvd.allreduce_(torch.full((length,), rank + 1.0), op=hvd.Sum, name=name)
            expect(found, torch.full((length,), float(total)), f"rank {rank}: reduction {number}")
            for _, handle, wanted in [each for each in begun if each[0] <= number]:
                expect(hvd.synchronize(handle), wanted, f"rank {rank}: begun before reduction {number}")
            begun = [each for each in begun if each[0] > number]
        for _, handle, wanted in begun:
            expect(hvd.synchronize(handle), wanted, f"rank {rank}: begun")
        hvd.shutdown()


@dataclass
class Threads:
    """Threads of each rank divide the operations between them, on each rank in another way.

    Each makes its own in the order of their numbers, so the first that is not done is always at somebody's front.
    """

    operations: list[tuple[str, int, int]]  # What, how long, and how often in turn
    threads: list[list[int]]
    """By rank and operation: which thread makes it; 0 is the one of the program."""
    pauses: list[dict[int, float]]
    """By rank: before which operations its thread sleeps, how long in all."""

    @classmethod
    def draw(cls, seed: int, size: int) -> Threads:
        """Draw one."""
        draw = random.Random(seed)
        operations = [
            (draw.choice(["sum", "sum", "gather", "begun", "wrong"]), draw.choice(LENGTHS), draw.choice([1, 1, 3]))
            for _ in range(draw.randint(2, 9))
        ]
        # For longer than any rank waits before it says for what, perhaps.
        pauses = [1e-4, 1e-3, 0.02, draw.choice([0.1, 0.1, 0.6])]
        threads = [[draw.randrange(most) for _ in operations] for most in draw.choices([1, 2, 2, 3], k=size)]
        paused = [
            {number: draw.choice(pauses) for number in range(len(operations)) if draw.random() < 0.15}
            for _ in range(size)
        ]
        return cls(operations, threads, paused)

    def __call__(self, hvd: Any, rank: int) -> None:
        from hvlike.system.system import system

        hvd.init()
        errors: list[BaseException] = []

        def make(thread: int) -> None:
            try:
                for number, owner in enumerate(self.threads[rank]):
                    if owner == thread:
                        pause = self.pauses[rank].get(number, 0.0)
                        # All ranks together sleep for long only where one was not woken.
                        for _ in range(max(1, round(pause / SHORT_SLEEP_SECONDS))):
                            system.sleep(min(pause, SHORT_SLEEP_SECONDS))
                        self.make(hvd, number, rank)
            except BaseException as error:
                errors.append(error)
                raise

        others = [
            system.Thread(target=make, args=(each,), name=f"thread {each}")
            for each in sorted({*self.threads[rank]} - {0})
        ]
        for each in others:
            each.start()
        make(0)
        for each in others:
            each.join()
        if errors:
            raise errors[0]
        hvd.shutdown()

    def make(self, hvd: Any, number: int, rank: int) -> None:
        """Make an operation, and check what it returns."""
        what, length, times = self.operations[number]
        size, name = hvd.size(), f"operation {number}"
        if what == "wrong" and size > 1:
            try:
                hvd.allreduce(torch.ones(length + (rank == number % size)), name=name)
            except MismatchError:
                return
            raise AssertionError(f"rank {rank}: {name} has other lengths, and is no error")
        for time in range(times):
            mine = torch.full((length,), float(rank + number + time))
            total = torch.full((length,), float(size * (size - 1) / 2 + size * (number + time)))
            if what == "gather":
                everybody = [torch.full((length,), float(each + number + time)) for each in range(size)]
                expect(hvd.allgather(mine, name=name), torch.cat(everybody), f"rank {rank}: {name}")
            elif what == "begun":
                handle = hvd.allreduce_async_(mine, op=hvd.Sum, name=name)
                expect(hvd.synchronize(handle), total, f"rank {rank}: {name}")
            else:
                expect(hvd.allreduce(mine, op=hvd.Sum, name=name), total, f"rank {rank}: {name}")
