"""Many calls of all kinds on every rank at once: python tests/support/soak/rpc_soak.py CALLS, under mpirun -n 4.

Every answer is checked. Ends with no live RRef anywhere, with memory that has stopped growing, and with a graceful
shutdown under leak checking. CALLS counts what all ranks issue, nested calls too. Rank 0 prints what came out.
"""

import contextlib
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from soaking import GROWTH_BYTES, Driver, Watch, settle

import hvlike as hvd
from hvlike import rpc

WARM_UP = 0.3
"""The part of the calls after which memory is watched."""
LOOKS = 100
SLEEP_SECONDS, PATIENCE_SECONDS = 0.2, 0.004


class Issued:
    """Counts the calls that this rank has issued, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.total = 0
        self.kinds: Counter[str] = Counter()

    def one(self, kind: str | None = None) -> None:
        """A call, or a step of a driver with this name."""
        with self._lock:
            if kind is None:
                self.total += 1
            else:
                self.kinds[kind] += 1


issued = Issued()


def sync(to: Any, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    issued.one()
    return rpc.rpc_sync(to, function, args, **options)


def start(to: Any, function: Callable[..., Any], *args: Any) -> Any:
    issued.one()
    return rpc.rpc_async(to, function, args)


def create(to: Any, function: Callable[..., Any], *args: Any) -> Any:
    issued.one()
    return rpc.remote(to, function, args)


# What is called.


def add(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left + right


def relay(path: list[int], value: int) -> int:
    """Go on to the next rank of the path and add one at each."""
    return value + 1 if not path else 1 + int(sync(path[0], relay, path[1:], value))


@rpc.functions.async_execution
def chain(path: list[int], value: int) -> Any:
    """The same without holding a thread meanwhile."""
    if not path:
        future: torch.futures.Future[int] = torch.futures.Future()
        future.set_result(value + 1)
        return future
    return start(path[0], chain, path[1:], value).then(lambda done: done.wait() + 1)


def scatter(hops: int, size: int) -> None:
    """Calls that nobody waits for, which outlive their callers."""
    if hops:
        start((hvd.rank() + hops) % size, scatter, hops - 1, size)


def fail(kind: str) -> None:
    raise {"ValueError": ValueError, "KeyError": KeyError, "TypeError": TypeError}[kind](f"asked for {kind}")


def sleepy() -> str:
    time.sleep(SLEEP_SECONDS)
    return "late"


class Account:
    """Something to refer to."""

    def __init__(self, value: torch.Tensor) -> None:
        self._value = value
        self._lock = threading.Lock()

    def deposit(self, amount: int) -> float:
        with self._lock:
            self._value += amount
            return float(self._value[0])


def refer(value: torch.Tensor) -> Any:
    """A reference to something of the callee."""
    return rpc.RRef(value)


def refer_further(to: int, value: torch.Tensor) -> Any:
    """A reference that the callee has had created on a third worker."""
    return create(to, torch.clone, value)


def pass_on(reference: Any, path: list[int]) -> float:
    """Hand a reference along a path of ranks; the last one looks at the value."""
    assert reference.is_owner() or reference.confirmed_by_owner()
    if path:
        return float(sync(path[0], pass_on, reference, path[1:]))
    return float(reference.to_here().sum())


def lose(reference: Any) -> None:
    """Take a reference and forget it."""


# What calls.


class Calls(Driver):
    """Draws what to do, does it, and checks the answer."""

    def kinds(self) -> dict[Callable[[], None], int]:
        """As Driver."""
        return {
            self.plain: 30,
            self.to_itself: 10,
            self.nested: 12,
            self.asynchronous: 12,
            self.many: 4,
            self.nobody_waits: 4,
            self.error: 8,
            self.timeout: 1,
            self.ring: 8,
            self.given: 6,
            self.account: 4,
            self.failed_creation: 3,
        }

    def step(self) -> str:
        """As Driver; counts what was done."""
        kind = super().step()
        issued.one(kind)
        return kind

    def plain(self) -> None:
        length = self._draw.choice([0, 1, 100, 1000, 10_000, 100_000])
        tensor = torch.full((length,), 1.5)
        assert torch.equal(sync(self._somebody(), add, tensor, tensor), torch.full((length,), 3.0))

    def to_itself(self) -> None:
        tensor = torch.ones(10)
        assert sync(self._rank, torch.add, tensor, tensor).sum() == 20

    def nested(self) -> None:
        path = self._path()
        assert sync(path[0], relay, path[1:], 5) == 5 + len(path)

    def asynchronous(self) -> None:
        path = self._path()
        assert start(path[0], chain, path[1:], 5).wait() == 5 + len(path)

    def many(self) -> None:
        futures = [start(self._somebody(), add, torch.ones(3), torch.ones(3)) for _ in range(20)]
        assert all(answer.sum() == 6 for answer in torch.futures.wait_all(futures))

    def nobody_waits(self) -> None:
        start(self._somebody(), scatter, 3, self._size)

    def error(self) -> None:
        kind = self._draw.choice(["ValueError", "KeyError", "TypeError"])
        with pytest.raises((ValueError, TypeError, RuntimeError), match=f"asked for {kind}"):
            sync(self._somebody(), fail, kind)

    def timeout(self) -> None:
        with pytest.raises(RuntimeError, match="RPC ran for more than"):
            sync(self._somebody(), sleepy, timeout=PATIENCE_SECONDS)

    def ring(self) -> None:
        around = [(self._rank + step) % self._size for step in range(1, self._size + 1)]
        reference = create(self._somebody(), torch.ones, (7,))
        assert sync(around[0], pass_on, reference, around[1:]) == 7
        if self._draw.random() < 0.3:
            # Together with the deletion of the creator's own.
            start(around[0], lose, reference)

    def given(self) -> None:
        somebody = self._somebody()
        reference = sync(somebody, refer, torch.ones(4))
        further = sync(somebody, refer_further, self._somebody(), torch.ones(5))
        assert sync(self._somebody(), pass_on, reference, self._path()) == 4
        assert further.to_here().sum() == 5

    def account(self) -> None:
        account = create(self._somebody(), Account, torch.zeros(1000))
        assert account.rpc_sync().deposit(2) == 2
        assert account.rpc_async().deposit(3).wait() == 5
        assert account.remote().deposit(4).to_here() == 9

    def failed_creation(self) -> None:
        reference = create(self._somebody(), fail, "ValueError")
        with pytest.raises((ValueError, RuntimeError), match="asked for ValueError"):
            reference.to_here()


def drive(calls: int) -> Watch:
    """Issue so many calls from two threads; returns what the memory was meanwhile."""
    watch = Watch(calls, warm_up=WARM_UP, looks=LOOKS)
    failures: list[BaseException] = []

    def run(driver: Calls) -> None:
        try:
            while issued.total < calls and not failures:
                driver.step()
        except BaseException as error:
            failures.append(error)
            raise

    second = threading.Thread(target=run, args=(Calls(1000 + hvd.rank()),), name="second caller")
    second.start()
    first = Calls(hvd.rank())
    while issued.total < calls and not failures:
        first.step()
        watch.look(issued.total)
    second.join()
    if failures:
        raise failures[0]
    return watch


def live_references() -> int:
    """How many values this rank still holds for others."""
    return len(rpc.statistics().live_rrefs)


def main() -> None:
    calls = int(sys.argv[1])
    hvd.init()
    rpc.api._set_leak_checking(True)
    rpc.init_rpc(f"worker{hvd.rank()}")
    begun = time.monotonic()
    # The tracebacks of failures that are asked for are no news.
    with open("/dev/null", "w") as nowhere, contextlib.redirect_stderr(nowhere):
        watch = drive(calls // hvd.size())
        taken = time.monotonic() - begun
        # Others still call this rank.
        everybody = rpc.api._all_gather((issued.total, dict(issued.kinds)))
    settle(lambda: not live_references())
    everything = rpc.api._all_gather((watch.slope, watch.growth, live_references()))
    rpc.shutdown()
    if hvd.rank() == 0:
        print(f"{sum(total for total, _ in everybody.values())} calls in {taken:.1f} s: {dict(issued.kinds)}")
    for worker, (bytes_per_call, grown, live) in sorted(everything.items()):
        if hvd.rank() == 0:
            print(f"{worker}: {bytes_per_call:+.1f} bytes a call, {grown / 2**20:+.2f} MiB, {live} live RRefs")
        assert live == 0, f"{worker} still holds {live} values"
        assert grown < GROWTH_BYTES, f"{worker} has grown by {grown:.0f} bytes"
    if hvd.rank() == 0:
        print("all well", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
