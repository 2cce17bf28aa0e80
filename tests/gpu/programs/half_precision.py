"""How exact sums of 16-bit floats are: over NCCL each addition rounds; in host memory sums are made in float32."""

import torch

import hvlike as hvd

hvd.init()
device = hvd.pin_device()
rank, size = hvd.rank(), hvd.size()
for dtype in (torch.bfloat16, torch.float16):
    generator = torch.Generator().manual_seed(rank)
    mine = torch.rand(100000, generator=generator).to(dtype)
    exact = hvd.allreduce(mine.double(), op=hvd.Average)
    for op in (hvd.Average, hvd.Sum):
        wanted = exact * (size if op is hvd.Sum else 1)
        errors = []
        for where in (device, torch.device("cpu")):
            got = hvd.allreduce(mine.to(where), op=op).cpu().double()
            spacing = torch.finfo(dtype).eps * 2.0 ** torch.floor(torch.log2(wanted))
            errors.append(f"{float(((got - wanted).abs() / spacing).max()):.2f}")
        if rank == 0:
            print(f"{dtype} {op}: off by {errors[0]} of the last place on the GPU, {errors[1]} on the CPU", flush=True)
infinite = hvd.allreduce(torch.full((4,), 60000.0, dtype=torch.float16, device=device), op=hvd.Average)
if rank == 0:
    print("average of 60000 in float16 on the GPU:", infinite.tolist(), flush=True)
