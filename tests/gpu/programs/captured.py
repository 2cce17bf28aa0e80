"""CUDA graphs beside hvlike: a capture goes through while another rank keeps an allreduce waiting."""

import time

import torch

import hvlike as hvd

hvd.init()
device = hvd.pin_device()
rank, size = hvd.rank(), hvd.size()
hvd.allreduce(torch.ones(4, device=device))
x = torch.ones(1000, device=device)
stream = torch.cuda.Stream(device)
stream.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(stream):
    for _ in range(3):
        y = (x * 2).sum()
torch.cuda.current_stream().wait_stream(stream)
torch.cuda.synchronize()
if rank == size - 1 and size > 1:
    time.sleep(0.5)
handle = hvd.allreduce_async(torch.full((1 << 20,), rank + 1.0, device=device), op=hvd.Sum, name="beside")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = (x * 2).sum()
    time.sleep(1.0)
x.fill_(3)
graph.replay()
torch.cuda.synchronize()
if y.item() != 6000:
    raise SystemExit(f"rank {rank}: the graph gave {y.item()}, expected 6000")
result = hvd.synchronize(handle)
expected = size * (size + 1) / 2
if not bool((result == expected).all()):
    raise SystemExit(f"rank {rank}: expected {expected}, got {result.unique()[:5]}")
print(f"rank {rank}: captured and reduced", flush=True)
