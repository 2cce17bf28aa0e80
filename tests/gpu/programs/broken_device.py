"""A kernel fails on one rank and with it all work on its GPU: the others are told, and the CPU goes on."""

import sys

import torch

import hvlike as hvd

hvd.init()
device = hvd.pin_device()
rank, size = hvd.rank(), hvd.size()
hvd.allreduce(torch.ones(1000, device=device))
if rank == size - 1:
    torch.ones(4, device=device)[torch.tensor([99], device=device)]  # An assertion on the device
try:
    result = hvd.allreduce(torch.ones(1000, device=device), name="broken")
    torch.cuda.synchronize()
    result = hvd.allreduce(torch.ones(1000, device=device), name="broken too")
    torch.cuda.synchronize()
except Exception as error:
    print(f"rank {rank}: {type(error).__name__}: {str(error).splitlines()[0][:200]}", flush=True)
else:
    print(f"rank {rank}: no error", flush=True)
total = hvd.allreduce(torch.ones(3), op=hvd.Sum, name="on the CPU")
if total.tolist() != [size] * 3:
    raise SystemExit(f"rank {rank}: got {total.tolist()} on the CPU")
print(f"rank {rank}: the CPU goes on", flush=True)
sys.stdout.flush()
