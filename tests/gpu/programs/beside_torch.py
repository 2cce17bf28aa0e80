"""Training over NCCL beside torch's own DDP over NCCL: the same parameters after some steps, in every class."""

import copy
import os
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

import hvlike as hvd
from hvlike.nn import DistributedDataParallel
from hvlike.optim import ZeroRedundancyOptimizer

hvd.init()
device = hvd.pin_device()
rank, size = hvd.rank(), hvd.size()
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
dist.init_process_group("nccl", rank=rank, world_size=size, timeout=timedelta(seconds=30))
torch.manual_seed(0)
first = torch.nn.Sequential(
    torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256), torch.nn.Linear(256, 8)
)
first.to(device)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    for step in range(10):
        generator = torch.Generator().manual_seed(step * size + rank)
        optimizer.zero_grad()
        model(torch.randn(16, 64, generator=generator).to(device)).square().mean().backward()
        optimizer.step()
    return [each.detach().clone() for each in model.parameters()]


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def with_optimizer(model: torch.nn.Module) -> list[torch.Tensor]:
    return train(model, hvd.DistributedOptimizer(sgd(model), model.named_parameters()))


def with_ddp(model: torch.nn.Module) -> list[torch.Tensor]:
    return train(DistributedDataParallel(model), sgd(model))


def with_zero(model: torch.nn.Module) -> list[torch.Tensor]:
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9, reduce_gradients=True
    )
    return train(model, optimizer)


model = copy.deepcopy(first)
expected = train(torch.nn.parallel.DistributedDataParallel(model, device_ids=[device.index]), sgd(model))
kinds: list[Callable[[torch.nn.Module], list[torch.Tensor]]] = [with_optimizer, with_ddp, with_zero]
for kind in kinds:
    for got, wanted in zip(kind(copy.deepcopy(first)), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    print(f"rank {rank}: {kind.__name__} ends where torch's DDP over NCCL ends", flush=True)
dist.destroy_process_group()
