"""rpc.DistributedOptimizer: trainers on all workers step the same parameters, in turns, each with its own gradients."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, optim

import hvlike

THREADS = 3
STEPS = 4


class Server:
    """The parameters, on one worker."""

    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.zeros(4))

    def forward(self, inputs: Tensor) -> Tensor:
        # A product would keep the weight for backward, and torch would see that others have changed it.
        return (self.weight + inputs) * inputs.detach()

    def get_weight(self) -> Tensor:
        return self.weight


class Alone(optim.SGD):
    """Sees whether another step of this worker runs at the same time."""

    running = 0
    most = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        Alone.running += 1
        Alone.most = max(Alone.most, Alone.running)
        # Others that wait for their turn would come in now.
        time.sleep(0.001)
        super().step()
        Alone.running -= 1


def most_at_once() -> int:
    return Alone.most


def test_every_step_counts_once(rpc: ModuleType, autograd: ModuleType) -> None:
    rank, size = rpc.get_worker_info().id, hvlike.size()
    server = rpc._all_gather(rpc.RRef(Server()) if rank == 0 else None)["worker0"]
    barrier = threading.Barrier(THREADS)

    def train(thread: int) -> None:
        optimizer = rpc.DistributedOptimizer(Alone, [server.remote().get_weight()], lr=1.0)
        gradient = torch.full((4,), float(rank * THREADS + thread))
        barrier.wait()
        for _ in range(STEPS):
            with autograd.context() as context_id:
                autograd.backward(context_id, [server.rpc_sync().forward(gradient).sum()])
                optimizer.step(context_id)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(train, range(THREADS)))
    rpc._barrier()
    total = STEPS * sum(range(size * THREADS))
    assert torch.equal(server.rpc_sync().get_weight().detach(), torch.full((4,), -float(total)))
    assert rpc.rpc_sync(0, most_at_once) == 1
    rpc._barrier()
