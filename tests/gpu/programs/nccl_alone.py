"""Whether NCCL itself works among these ranks: torch's own backend, without hvlike. Run first: all else rests on it."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

rank, size = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
local_rank = int(os.environ["OMPI_COMM_WORLD_LOCAL_RANK"])
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
device = torch.device("cuda", local_rank % torch.cuda.device_count())
torch.cuda.set_device(device)
dist.init_process_group("nccl", rank=rank, world_size=size, timeout=timedelta(seconds=20))
tensor = torch.full((1 << 20,), rank + 1.0, device=device)
dist.all_reduce(tensor)
expected = size * (size + 1) / 2
if not bool((tensor == expected).all()):
    raise SystemExit(f"rank {rank}: expected {expected}, got {tensor.unique().tolist()[:5]}")
print(f"rank {rank} of {size} on {torch.cuda.get_device_name(device)}: all_reduce over NCCL is right", flush=True)
dist.destroy_process_group()
