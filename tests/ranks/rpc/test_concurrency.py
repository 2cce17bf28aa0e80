"""Calls at once: within each other, from several threads, beside collectives, while the main thread is elsewhere."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
from support.rpc.doors import door, open_door, pass_door, wait_for

import hvlike.rpc

THREADS = 16
"""Functions that a worker runs at a time, unless init_rpc is told otherwise."""


class Crowd:
    """Counts how many are inside at the same time on this worker."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inside = 0
        self.most = 0

    def enter(self) -> None:
        with self.lock:
            self.inside += 1
            self.most = max(self.most, self.inside)

    def leave(self) -> None:
        with self.lock:
            self.inside -= 1


CROWDS: dict[str, Crowd] = {}


def stay(name: str) -> int:
    """Be inside until the door opens."""
    crowd = CROWDS.setdefault(name, Crowd())
    crowd.enter()
    pass_door(name)
    crowd.leave()
    return crowd.most


def inside(name: str) -> int:
    return CROWDS.setdefault(name, Crowd()).inside


def bounce(turns: int, other: int) -> list[int]:
    """Call each other `turns` times from inside the calls; the ranks that were visited."""
    me = hvlike.rpc.get_worker_info().id
    if turns == 0:
        return [me]
    return [me, *hvlike.rpc.rpc_sync(other, bounce, (turns - 1, me))]


def ring(turns: int) -> int:
    """Pass a call on around the ring from inside the calls."""
    if turns == 0:
        return 0
    next_rank = (hvlike.rpc.get_worker_info().id + 1) % hvlike.size()
    result: int = hvlike.rpc.rpc_sync(next_rank, ring, (turns - 1,)) + 1
    return result


def test_no_more_functions_run_at_once_than_there_are_threads(rpc: ModuleType, hvd: ModuleType, name: str) -> None:
    # Everyone is its own callee: on a shared one the calls of all would share the threads.
    futures = [rpc.rpc_async(hvd.rank(), stay, (name,)) for _ in range(THREADS + 10)]
    wait_for(lambda: inside(name) == THREADS)
    open_door(name)
    assert max(torch.futures.wait_all(futures)) == THREADS


def test_functions_call_back(hvd: ModuleType, rpc: ModuleType, peer: int) -> None:
    me = hvd.rank()
    assert rpc.rpc_sync(peer, bounce, (6, me)) == [peer, me, peer, me, peer, me, peer]


def test_functions_that_all_wait_for_each_other(rpc: ModuleType, peer: int) -> None:
    # Every rank at the same time: each has threads that wait for the next one's.
    futures = [rpc.rpc_async(peer, ring, (3,)) for _ in range(3)]
    assert torch.futures.wait_all(futures) == [3, 3, 3]


def test_a_worker_that_is_busy_elsewhere_serves(hvd: ModuleType, rpc: ModuleType, peer: int, name: str) -> None:
    # The main thread of every rank makes no call: it waits for something that only a served request brings about.
    caller = threading.Thread(target=lambda: rpc.rpc_sync(peer, open_door, (f"{name[: name.rindex(' ')]} of {peer}",)))
    caller.start()
    mine = door(f"{name[: name.rindex(' ')]} of {hvd.rank()}")
    end = time.monotonic() + 60
    while not mine.is_set():
        torch.ones(1000).sum()
        assert time.monotonic() < end
    caller.join()


LENGTH = 20_000


@contextmanager
def traffic(rpc: ModuleType, rank: int, size: int) -> Iterator[None]:
    """A thread calls everybody with small and large tensors meanwhile, a few times at least."""
    stop = threading.Event()
    failures: list[BaseException] = []

    def call() -> None:
        calls = 0
        try:
            while calls < 20 or not stop.is_set():
                length = LENGTH if calls % 5 == 0 else 10
                answer = rpc.rpc_sync((rank + calls) % size, torch.add, (torch.ones(length), calls))
                assert (answer == calls + 1).all()
                calls += 1
                # Leaves the interpreter to the main thread.
                time.sleep(0.001)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if failures:
        raise failures[0]


def test_collectives_in_the_main_thread_while_calls_run(hvd: ModuleType, rpc: ModuleType) -> None:
    rank, size = hvd.rank(), hvd.size()
    with traffic(rpc, rank, size):
        for step in range(15):
            total = hvd.allreduce(torch.full((LENGTH,), float(rank + step)), op=hvd.Sum)
            assert (total == sum(range(size)) + size * step).all()
            assert hvd.broadcast(torch.tensor(rank), root_rank=size - 1) == size - 1
            assert hvd.allgather(torch.tensor([rank])).tolist() == list(range(size))


def train(hvd: ModuleType, steps: int) -> torch.Tensor:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(30, 100), torch.nn.Tanh(), torch.nn.Linear(100, 1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    torch.manual_seed(1 + hvd.rank())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 30)).square().mean().backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_a_training_while_calls_run_gives_the_same_weights(hvd: ModuleType, rpc: ModuleType) -> None:
    alone = train(hvd, 5)
    with traffic(rpc, hvd.rank(), hvd.size()):
        assert torch.equal(train(hvd, 5), alone)


def sum_of_all(name: str, value: float) -> float:
    """A collective inside handlers: every worker runs one."""
    import hvlike

    return float(hvlike.allreduce(torch.tensor([value]), op=hvlike.Sum, name=name))


def test_handlers_meet_in_a_collective(hvd: ModuleType, rpc: ModuleType) -> None:
    rank, size = hvd.rank(), hvd.size()
    # Every rank has all ranks meet, under a name of its own.
    futures = [rpc.rpc_async(other, sum_of_all, (f"meeting {rank}", float(other))) for other in range(size)]
    assert torch.futures.wait_all(futures) == [float(sum(range(size)))] * size
    hvd.barrier()
