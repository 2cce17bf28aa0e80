"""A kernel fails on one rank, and with it all work on its GPU: every rank gets an error, and the job ends by itself."""

import torch

import hvlike as hvd

hvd.init()
device = hvd.pin_device()
rank, size = hvd.rank(), hvd.size()
hvd.allreduce(torch.ones(1000, device=device))
if rank == size - 1:
    torch.ones(4, device=device)[torch.tensor([99], device=device)]  # An assertion on the device
told = ""
try:
    for number in range(100):
        hvd.allreduce(torch.ones(1000, device=device), name=f"broken {number}")
        torch.cuda.synchronize()
except Exception as error:
    told = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
if not told:
    raise SystemExit(f"rank {rank}: 100 operations, and no error")
print(f"rank {rank}: {told}", flush=True)
try:
    hvd.shutdown()
except hvd.HorovodInternalError as error:
    print(f"rank {rank}: shutdown() says {str(error).splitlines()[0][:200]}", flush=True)
print(f"rank {rank}: at the end", flush=True)
