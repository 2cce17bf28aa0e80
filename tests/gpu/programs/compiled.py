"""torch.compile(mode="reduce-overhead"), which captures CUDA graphs, with hvlike's optimizer and DDP: as without it."""

import copy

import torch

import hvlike as hvd
from hvlike.nn import DistributedDataParallel

hvd.init()
device = hvd.pin_device()
rank, size = hvd.rank(), hvd.size()
torch.manual_seed(0)
first = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)).to(device)


def train(kind: str, *, compiled: bool) -> list[torch.Tensor]:
    model = copy.deepcopy(first)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped: torch.nn.Module = model
    if kind == "optimizer":
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    else:
        wrapped = DistributedDataParallel(model)
    forward = torch.compile(wrapped, mode="reduce-overhead") if compiled else wrapped
    for step in range(8):
        generator = torch.Generator().manual_seed(step * size + rank)
        optimizer.zero_grad()
        forward(torch.randn(16, 32, generator=generator).to(device)).square().mean().backward()
        optimizer.step()
    return [each.detach().clone() for each in model.parameters()]


for kind in ("optimizer", "ddp"):
    for got, wanted in zip(train(kind, compiled=True), train(kind, compiled=False), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    print(f"rank {rank}: {kind} compiled with reduce-overhead trains as without", flush=True)
