"""RPC and collectives at once in one process: neither waits for the other, and both give what they give alone."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch

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


@pytest.mark.mpi(min_size=2)
def test_a_collective_waits_for_a_rank_that_serves_meanwhile(hvd: ModuleType, rpc: ModuleType) -> None:
    rank, size = hvd.rank(), hvd.size()
    if rank == 0:
        # All others are in the barrier by now or soon.
        for other in range(1, size):
            assert rpc.rpc_sync(other, torch.add, (torch.ones(LENGTH), 1)).sum() == 2 * LENGTH
    hvd.barrier()
