"""Random programs of RPC: every rank makes calls that make further calls, and knows by arithmetic what they return."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hvlike import rpc
from hvlike.system.system import of_process, system

WAYS = ("sync", "async", "remote", "passed", "kept", "returned", "proxy", "later")
ALONE = ("raises", "late", "raced")
"""Calls that make no further ones, and add nothing to what their caller returns."""
LENGTHS = (1, 5, 3_000, 20_000)
LATE_SECONDS = 0.3


@dataclass(frozen=True)
class Call:
    """One call: the callee returns a tensor filled with `value_of` it."""

    number: int
    way: str
    to: int
    via: int  # Who gets the RRef, if that is passed on
    length: int
    inner: tuple[Call, ...] = ()  # What the callee calls on its part
    order: tuple[int, ...] = ()  # In which it ends them


def value_of(call: Call) -> float:
    """What the tensor of a call is filled with."""
    return call.number + 100.0 * call.to + sum(adds(each) for each in call.inner)


def adds(call: Call) -> float:
    """What a call adds to the tensor of its caller."""
    return 0.0 if call.way in ALONE else value_of(call)


class Kept:
    """The RRefs that others have left with this rank."""

    def __init__(self) -> None:
        self.rrefs: dict[int, Any] = {}


kept = of_process(Kept)


def worker(rank: int) -> str:
    """The name of a rank."""
    return f"worker{rank}"


# -- what runs on the callee -----------------------------------------------------------------------


def serve(call: Call) -> Tensor:
    """Make the further calls, and return the tensor."""
    here = rpc.get_worker_info().id
    assert here == call.to, f"call {call.number} came to rank {here}"
    return torch.full((call.length,), call.number + 100.0 * here + perform(call.inner, call.order), dtype=torch.double)


def serve_reference(call: Call) -> Any:
    """The same, kept here."""
    return rpc.RRef(serve(call))


@rpc.functions.async_execution
def serve_later(call: Call) -> Any:
    """The same, without a thread that waits for the further calls."""
    begun = [rpc.rpc_async(worker(each.to), serve, (each,)) for each in call.inner]

    def end(_: object) -> Tensor:
        found = sum(one_number(each.wait(), about) for each, about in zip(begun, call.inner, strict=True))
        return torch.full((call.length,), call.number + 100.0 * call.to + found, dtype=torch.double)

    return torch.futures.collect_all(begun).then(end)


def fetch(rref: Any) -> Tensor:
    """The value behind an RRef, which may be anybody's."""
    found: Tensor = rref.to_here()
    return found


def keep(number: int, rref: Any) -> None:
    """Keep an RRef beyond this call."""
    kept.rrefs[number] = rref


def fetch_kept(number: int, forget: bool) -> Tensor:
    """The value of an RRef that is kept here."""
    rref = kept.rrefs.pop(number) if forget else kept.rrefs[number]
    return fetch(rref)


def fail(number: int) -> None:
    """Raise an error, of another class each time."""
    raise (ValueError, TypeError, KeyError)[number % 3](f"call {number} fails")


def take_long(seconds: float) -> Any:
    """Return a reference that nobody wants any more."""
    system.sleep(seconds)
    return rpc.RRef(torch.ones(2))


class Served:
    """An object of the callee whose methods are called."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.asked = 0

    def ask(self) -> int:
        """Count this."""
        self.asked += 1
        return self.asked

    def serve(self) -> Tensor:
        """Return the tensor, once it has been asked for twice."""
        assert self.asked == 2, f"{self.asked} calls of two have come before"
        return serve(self.call)


# -- what runs on the caller -----------------------------------------------------------------------


def one_number(found: Any, call: Call) -> float:
    """Check the tensor that a call has returned."""
    assert isinstance(found, Tensor), f"call {call.number} has returned {found}"
    assert found.shape == (call.length,), f"call {call.number} has returned {list(found.shape)}"
    wanted = value_of(call)
    assert bool((found == wanted).all()), f"call {call.number}: {found[:4]}, expected {wanted}"
    return wanted


def begin(call: Call) -> Callable[[], float]:
    """Begin a call; what is returned ends it, checks it, and returns what it adds."""
    to, arguments = worker(call.to), (call,)
    if call.way in ALONE:
        return lambda: fail_alone(call)
    if call.way == "sync":
        found = rpc.rpc_sync(to, serve, arguments)
        return lambda: one_number(found, call)
    if call.way in ("async", "later"):
        future = rpc.rpc_async(to, serve if call.way == "async" else serve_later, arguments)
        return lambda: one_number(future.wait(), call)
    if call.way == "returned":
        coming = rpc.rpc_async(to, serve_reference, arguments)
        return lambda: one_number(coming.wait().to_here(), call)
    if call.way == "proxy":
        served = rpc.remote(to, Served, arguments)
        asked = [served.rpc_async().ask() for _ in range(2)]
        return lambda: ask_twice(served, asked, call)
    rref = rpc.remote(to, serve, arguments)
    if call.way == "remote":
        return lambda: one_number(rref.to_here(), call)
    if call.way == "passed":
        passed = rpc.rpc_async(worker(call.via), fetch, (rref,))
        return lambda: one_number(passed.wait(), call)
    assert call.way == "kept"
    rpc.rpc_sync(worker(call.via), keep, (call.number, rref))
    forgets = call.number % 2 == 0
    return lambda: one_number(rpc.rpc_sync(worker(call.via), fetch_kept, (call.number, forgets)), call)


def ask_twice(served: Any, asked: Sequence[Any], call: Call) -> float:
    """Ask an object that has been asked twice."""
    assert sorted(each.wait() for each in asked) == [1, 2]
    return one_number(served.rpc_sync().serve(), call)


def fail_alone(call: Call) -> float:
    """Make a call that ends with an error, or may do so."""
    failure: Exception | None = None
    try:
        if call.way == "raises":
            rpc.rpc_sync(worker(call.to), fail, (call.number,))
        else:
            seconds = LATE_SECONDS if call.way == "late" else 1e-3 * (1 + call.number % 4)
            rpc.rpc_sync(worker(call.to), take_long, (seconds,), timeout=2e-3)
    except (RuntimeError, ValueError, TypeError) as error:
        failure = error
    if failure is None:
        # Who is held up finds the answer beside the end of its time.
        assert call.way != "raises", f"call {call.number} has no error"
        return 0.0
    wanted = f"call {call.number} fails" if call.way == "raises" else "ran for more than set timeout"
    if wanted not in str(failure):
        raise failure
    kind = (ValueError, TypeError, RuntimeError)[call.number % 3] if call.way == "raises" else RuntimeError
    assert isinstance(failure, kind), f"call {call.number}: {type(failure)}"
    return 0.0


def perform(calls: Sequence[Call], order: Sequence[int]) -> float:
    """Make calls beside each other; returns what they add."""
    ends = [begin(each) for each in calls]
    return sum(ends[place]() for place in order)


# -- programs --------------------------------------------------------------------------------------


@dataclass
class Session:
    """The rounds of calls between init_rpc and the end; in each, the calls of every rank and their order."""

    threads: int
    end: str
    rounds: list[list[tuple[tuple[Call, ...], tuple[int, ...]]]] = field(default_factory=list)
    between: list[str] = field(default_factory=list)
    """What all ranks do after a round."""
    left: list[Call] = field(default_factory=list)
    """A call of each rank that nobody has waited for when the session ends."""


class Author:
    """Draws calls and sessions."""

    def __init__(self, seed: int, size: int) -> None:
        self.draw = random.Random(seed)
        self.size = size
        self.numbers = 0
        self.blocking = 0  # Calls that hold a thread of their callee while they wait

    def calls(self, depth: int) -> tuple[tuple[Call, ...], tuple[int, ...]]:
        most = (3, 2, 1)[depth]
        calls = tuple(self.call(depth) for _ in range(self.draw.randint(1 if depth == 0 else 0, most)))
        order = list(range(len(calls)))
        self.draw.shuffle(order)
        return calls, tuple(order)

    def call(self, depth: int, way: str = "") -> Call:
        self.numbers += 1
        number = self.numbers
        way = way or self.draw.choice(WAYS + WAYS + ALONE)
        inner: tuple[Call, ...] = ()
        order: tuple[int, ...] = ()
        if way == "later":
            inner = tuple(self.call(2, "sync") for _ in range(self.draw.randint(0, 2)))
        elif way not in ALONE and depth < 2:
            inner, order = self.calls(depth + 1)
        # And `fetch` where an RRef is passed on.
        self.blocking += bool(inner) + (way in ("passed", "kept", "late", "raced"))
        to, via = self.draw.randrange(self.size), self.draw.randrange(self.size)
        return Call(number, way, to, via, self.draw.choice(LENGTHS), inner, order)

    def session(self, *, last: bool) -> Session:
        made = Session(0, self.draw.choice(["graceful", "graceful", "at once", "by hvlike"]))
        if made.end == "by hvlike" and not last:
            made.end = "graceful"
        self.blocking = 0
        for _ in range(self.draw.randint(1, 2)):
            made.rounds.append([self.calls(0) for _ in range(self.size)])
            made.between.append(self.draw.choice(["nothing", "barrier", "gather", "sum"]))
        if made.end == "graceful" and self.draw.random() < 0.5:
            made.left = [self.call(1) for _ in range(self.size)]
        made.threads = self.blocking + self.draw.choice([1, 16])
        return made


@dataclass
class Rpc:
    """Sessions of RPC, after the first perhaps in a new run of hvlike."""

    sessions: list[Session]
    anew: bool
    two_threads: bool
    """Each rank makes its calls in two threads."""

    @classmethod
    def draw(cls, seed: int, size: int) -> Rpc:
        """Draw one."""
        author = Author(seed, size)
        count = author.draw.choice([1, 1, 2, 3])
        sessions = [author.session(last=number == count - 1) for number in range(count)]
        return cls(sessions, author.draw.random() < 0.5, author.draw.random() < 0.3)

    def __call__(self, hvd: Any, rank: int) -> None:
        for session in self.sessions:
            rpc.init_rpc(worker(rank), num_worker_threads=session.threads)
            rpc.api._set_leak_checking(True)
            for calls, between in zip(session.rounds, session.between, strict=True):
                self._round(*calls[rank])
                meet(hvd, rank, between)
            self._end(hvd, rank, session)
            if self.anew:
                hvd.shutdown()
        if not self.anew:
            hvd.shutdown()

    def _round(self, calls: tuple[Call, ...], order: tuple[int, ...]) -> None:
        wanted = sum(map(adds, calls))
        if not self.two_threads or len(calls) < 2:
            assert perform(calls, order) == wanted
            return
        found: list[Any] = []

        def other() -> None:
            try:
                found.append(perform(calls[1:], range(len(calls) - 1)))
            except Exception as error:
                found.append(error)

        thread = system.Thread(target=other, name="program", daemon=True)
        thread.start()
        mine = perform(calls[:1], [0])
        thread.join()
        if isinstance(found[0], Exception):
            raise found[0]
        assert mine + found[0] == wanted

    def _end(self, hvd: Any, rank: int, session: Session) -> None:
        end = begin(session.left[rank]) if session.left and session.left[rank].way in ("async", "later") else None
        if session.end == "graceful":
            rpc.shutdown()
        else:
            # Nobody calls a rank that has left.
            hvd.barrier()
            if session.end == "at once":
                rpc.shutdown(graceful=False)
                hvd.barrier()
        kept.rrefs.clear()
        if end is not None:
            end()
        if session.end != "by hvlike":
            assert not rpc._is_current_rpc_agent_set()


def meet(hvd: Any, rank: int, how: str) -> None:
    """Wait for all ranks in one way or another."""
    size = hvd.size()
    if how == "barrier":
        rpc._barrier()
    elif how == "gather":
        assert rpc._all_gather(rank) == {worker(each): each for each in range(size)}
    elif how == "sum":
        found = hvd.allreduce(torch.full((3,), float(rank)), op=hvd.Sum, name="beside")
        assert found.tolist() == [size * (size - 1) / 2] * 3
