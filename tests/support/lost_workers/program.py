"""What every rank does in one job of the campaign: RPC of all kinds, while an outside process kills one of the ranks.

program.py SEED MOMENT, under mpirun --with-ft ulfm. Every operation knows which workers it involves. Without a lost one
among them it must succeed; with one it must succeed or raise a WorkerLostError that names it, in time. The session is
then ended, and the survivors begin another one, among themselves. Each prints SURVIVED and what it saw.
"""

import faulthandler
import os
import random
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

import hvlike as hvd
from hvlike import autograd, rpc
from hvlike.collectives.session.context import current
from hvlike.errors import PeerLeftError, WorkerLostError

LIMIT_SECONDS = 8.0
"""An operation may take so long, on a machine that is shared."""
STEPS_AFTERWARDS = 25
PATIENCE_SECONDS = 20.0
UNUSED_TOPIC = 900


def say(text: str) -> None:
    # One write: the lines of several ranks must not be mixed.
    os.write(1, f"{text}\n".encode())


# What is called.


def add(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left + right


def relay(path: list[int], value: int) -> int:
    return int(rpc.rpc_sync(path[0], relay, (path[1:], value))) + 1 if path else value + 1


@rpc.functions.async_execution
def chain(path: list[int], value: int) -> Any:
    """The same without holding a thread meanwhile."""
    if path:
        return rpc.rpc_async(path[0], chain, (path[1:], value)).then(lambda done: done.wait() + 1)
    future: torch.futures.Future[int] = torch.futures.Future()
    future.set_result(value + 1)
    return future


def look_at(reference: Any, path: list[int]) -> float:
    """Hand a reference along a path; the last worker looks at the value."""
    return float(rpc.rpc_sync(path[0], look_at, (reference, path[1:])) if path else reference.to_here().sum())


def refer_further(to: int, value: torch.Tensor) -> Any:
    """A reference that the callee has created on a third worker."""
    return rpc.remote(to, torch.clone, (value,))


def weight() -> torch.Tensor:
    return torch.full((2,), 3.0, requires_grad=True)


def square_on(path: list[int], value: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync(path[0], square_on, (path[1:], value)) if path else value * value


class Caller:
    """Draws operations and carries them out, in one thread."""

    def __init__(self, seed: int, worst: list[float], seen: Counter[str]) -> None:
        self._draw = random.Random(seed)
        self._rank, self._size = hvd.rank(), hvd.size()
        self._worst, self._seen = worst, seen
        self.lost: set[int] = set()
        self.is_over = False  # Another survivor has begun another session: nothing goes on in this one
        self._kinds: list[Callable[[list[int]], None]] = [
            self.sync, self.asynchronous, self.nested, self.chained, self.created, self.handed_on,
            self.created_further, self.callback, self.many, self.fast, self.safe, self.smart, self.optimizer,
        ]  # fmt: skip

    def step(self) -> None:
        """One operation; AssertionError unless it ends as it must."""
        kind = self._draw.choice(self._kinds)
        path = [self._draw.choice([each for each in range(self._size) if each != self._rank])]
        path += self._draw.choices(range(self._size), k=self._draw.randint(0, 2))
        known = self.lost & set(path)
        began = time.monotonic()
        error: RuntimeError | None = None
        try:
            kind(path)
        except RuntimeError as raised:
            error = raised
        seconds = time.monotonic() - began
        if isinstance(error, PeerLeftError) and "starts again" in str(error):
            self.is_over = True
        elif error is None:
            # It needs every worker of its path, so it cannot succeed.
            assert not known, f"{kind.__name__} over {path} has succeeded without {known}"
        else:
            # What raises in a callback is a plain RuntimeError, in torch's futures.
            of_callback = kind == self.callback and "WorkerLostError: " in str(error)
            assert isinstance(error, WorkerLostError) or of_callback, f"{kind.__name__} over {path}: {error!r}"
            named = {int(each) for each in re.findall(r"worker\d+ \(rank (\d+)\)", str(error))}
            assert named & set(path), f"{kind.__name__} over {path}: {error}"
            self.lost |= named & set(path)
            self._seen[kind.__name__] += 1
        self._worst[0] = max(self._worst[0], seconds)
        assert seconds < LIMIT_SECONDS, f"{kind.__name__} over {path} took {seconds:.1f} s"

    def sync(self, path: list[int]) -> None:
        size = self._draw.choice([1, 1000, 300_000])
        for each in path:
            assert rpc.rpc_sync(each, add, (torch.ones(size), 1)).sum() == 2 * size

    def asynchronous(self, path: list[int]) -> None:
        futures = [rpc.rpc_async(each, add, (torch.ones(1000), 1)) for each in path]
        assert all(future.wait().sum() == 2000 for future in futures)

    def many(self, path: list[int]) -> None:
        futures = [rpc.rpc_async(each, max, (each, -1)) for each in path * 10]
        assert torch.futures.wait_all(futures) == path * 10

    def callback(self, path: list[int]) -> None:
        future = rpc.rpc_async(path[0], max, (1, 2)).then(lambda done: done.wait() + 1)
        assert future.wait() == 3
        self.sync(path[1:])

    def nested(self, path: list[int]) -> None:
        assert rpc.rpc_sync(path[0], relay, (path[1:], 5)) == 5 + len(path)

    def chained(self, path: list[int]) -> None:
        assert rpc.rpc_async(path[0], chain, (path[1:], 5)).wait() == 5 + len(path)

    def created(self, path: list[int]) -> None:
        for each in path:
            reference = rpc.remote(each, torch.full, ((3,), 2.0))
            assert reference.to_here().sum() == 6
            assert reference.rpc_sync().sum() == 6

    def handed_on(self, path: list[int]) -> None:
        reference = rpc.remote(path[0], torch.ones, (7,)) if len(path) > 1 else rpc.RRef(torch.ones(7))
        to, *further = path[1:] or path
        assert rpc.rpc_sync(to, look_at, (reference, further)) == 7

    def created_further(self, path: list[int]) -> None:
        reference = rpc.rpc_sync(path[0], refer_further, (path[-1], torch.ones(5)))
        assert reference.to_here().sum() == 5
        self.sync(path[1:-1])

    def _backward(self, path: list[int], mode: str) -> None:
        leaf = torch.full((2,), 3.0, requires_grad=True)
        with autograd.context() as context:
            root = rpc.rpc_sync(path[0], square_on, (path[1:], leaf)).sum()
            autograd.backward(context, [root], mode=mode)
            assert autograd.get_gradients(context)[leaf].tolist() == [6, 6]

    def fast(self, path: list[int]) -> None:
        self._backward(path, "fast")

    def safe(self, path: list[int]) -> None:
        self._backward(path, "safe")

    def smart(self, path: list[int]) -> None:
        self._backward(path, "smart")

    def optimizer(self, path: list[int]) -> None:
        weights = [rpc.remote(each, weight) for each in path]
        optimizer = rpc.DistributedOptimizer(torch.optim.SGD, weights, lr=0.5)
        with autograd.context() as context:
            total = sum((each.to_here() for each in weights), torch.zeros(2)).sum()
            autograd.backward(context, [total])
            optimizer.step(context)
        assert all(each.to_here().tolist() == [2.5, 2.5] for each in weights)


def work(seed: int, worst: list[float], seen: Counter[str]) -> set[int]:
    """Call from two threads until a worker is lost, and some time longer. Returns who was lost."""
    callers = [Caller(10 * seed + thread, worst, seen) for thread in range(2)]
    wrong: list[BaseException] = []

    def run(caller: Caller) -> None:
        until = time.monotonic() + PATIENCE_SECONDS
        try:
            while not (caller.lost or caller.is_over or wrong):
                assert time.monotonic() < until, "no worker was lost"
                caller.step()
            for _ in range(STEPS_AFTERWARDS):
                if not caller.is_over:
                    caller.step()
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(caller,)) for caller in callers]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    if wrong:
        raise wrong[0]
    return callers[0].lost | callers[1].lost


def timed(worst: list[float], call: Callable[[], None]) -> Exception | None:
    """Return what the call raises."""
    began = time.monotonic()
    try:
        call()
    except Exception as error:
        return error
    finally:
        worst[0] = max(worst[0], time.monotonic() - began)
        assert time.monotonic() - began < LIMIT_SECONDS, f"{call} took {time.monotonic() - began:.1f} s"
    return None


def die_as_it_sends(to: int) -> None:
    """Be killed when MPI has told the receiver of a message, and not yet handed over the whole of it."""
    fabric = current().fabric

    def send() -> None:
        fabric.channel.send(to, UNUSED_TOPIC, b"x" * 30_000)
        os.kill(os.getpid(), signal.SIGKILL)

    fabric.loop.post(send)


def begin() -> None:
    rpc.init_rpc(f"worker{hvd.rank()}")


def main() -> None:
    seed, moment, victim = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    faulthandler.dump_traceback_later(45)
    hvd.init()
    name, rank = f"rank {hvd.rank()}", hvd.rank()
    worst, seen = [0.0], Counter[str]()
    # The first step of an optimizer imports a lot.
    torch.optim.SGD([torch.ones(1)], lr=0.1).step()
    torch.autograd.grad(torch.ones(1, requires_grad=True).sum(), [torch.ones(1, requires_grad=True)], allow_unused=True)
    if moment == "in init_rpc" and rank == victim:
        say(f"READY {os.getpid()}")
        signal.pause()
    error = None
    if moment == "in init_rpc":
        error = timed(worst, begin)
        assert isinstance(error, PeerLeftError), error
    else:
        begin()
        for each in range(hvd.size()):
            rpc.rpc_sync(each, add, (torch.ones(3), 1))
    if rank == victim:
        say(f"READY {os.getpid()}")
    if moment == "in shutdown":
        if rank == victim:
            signal.pause()
        error = timed(worst, rpc.shutdown)
        assert isinstance(error, WorkerLostError), error
        assert f"worker{victim} (rank {victim})" in str(error), error
    elif moment != "in init_rpc":
        if rank == victim and moment == "as it sends":
            threading.Timer(0.3, die_as_it_sends, ((victim + 1) % hvd.size(),)).start()
        # In every other job a survivor starts again at once, and the others may meet that, too.
        leaver = (victim + 1) % hvd.size() if seed % 2 else victim
        assert work(seed * 10 + rank, worst, seen) - {leaver} == {victim} - {leaver}
        if rank != leaver:
            error = timed(worst, rpc.shutdown)
            assert error is None or (leaver != victim and isinstance(error, WorkerLostError)), error
    assert timed(worst, hvd.shutdown) is None
    hvd.init()
    begin()
    for each in range(hvd.size()):
        assert rpc.rpc_sync(each, add, (torch.ones(3), 1)).sum() == 6
    rpc.shutdown()
    say(f"SURVIVED {name} as rank {hvd.rank()} of {hvd.size()}, worst {worst[0]:.2f} s, {sum(seen.values())} errors")


if __name__ == "__main__":
    main()
